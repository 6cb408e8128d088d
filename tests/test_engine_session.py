"""A session: the same logits however it is filled, saved and restored."""

import pytest
import torch
from golden_model import make_folder

import labkit
from labkit.engine.session import Session, one_thread
from labkit.errors import InputError

PARTS = {"global_kv", "index_keys", "window", "remainder", "engram", "draft", "reserved"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return labkit.load(make_folder(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """float64 without cache rounding: any split of a text must agree to 1e-9."""
    return labkit.load(make_folder(tmp_path_factory.mktemp("exact")), dtype=torch.float64,
                       cache_rounding=False)


def ids_of(length, seed=0):
    return torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split", [[29], [1, 28], [7, 1, 1, 20], [8, 9, 12], [1] * 29])
def test_chunks_and_steps_equal_one_pass(exact, split):
    ids = ids_of(29)
    whole = exact.model(ids[None]).logits
    session, parts, at = exact.session(), [], 0
    for length in split:
        if length == 1:
            parts.append(session.decode(int(ids[at])))
        else:
            parts.append(session.prefill(ids[at : at + length]))
        at += length
        assert session.length == at
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


def test_shapes_and_last_only(lab):
    ids = ids_of(11)
    a, b = lab.session(), lab.session()
    full, last = a.prefill(ids), b.prefill(ids.tolist(), last_only=True)
    assert full.shape == (1, 11, 512) and last.shape == (1, 1, 512)
    torch.testing.assert_close(full[:, -1:], last, rtol=1e-5, atol=1e-5)
    assert a.decode(7).shape == (1, 1, 512)
    assert not full.requires_grad


def test_restore_goes_back_exactly_and_as_often_as_wanted(lab):
    session = lab.session()
    session.prefill(ids_of(13))
    saved = session.snapshot()
    first = [session.decode(int(i)) for i in ids_of(9, 1)]
    for other in (2, 3):
        session.restore(saved)
        assert session.length == 13
        session.prefill(ids_of(21, other))  # another way on, past the window
        session.restore(saved)
        again = [session.decode(int(i)) for i in ids_of(9, 1)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    twin = Session(lab.model)
    twin.restore(saved)
    assert torch.equal(twin.decode(int(ids_of(9, 1)[0])), first[0])


def test_restore_refuses_what_does_not_fit(lab):
    with pytest.raises(InputError, match="what snapshot"):
        lab.session().restore(lab.session())
    with pytest.warns(UserWarning):
        other = labkit.load("nano")
    other.model.config = other.config.replace(index_topk=5)
    with pytest.raises(InputError, match="another config"):
        other.session().restore(lab.session().snapshot())


def test_restore_refuses_a_state_of_another_dtype_or_device(lab, tmp_path):
    half = labkit.load(make_folder(tmp_path / "half"), dtype=torch.bfloat16, device="cpu")
    assert half.config == lab.config
    session, twin, source = half.session(), half.session(), lab.session()
    for each in (session, twin, source):
        each.prefill(ids_of(7))
    with pytest.raises(InputError, match="float32 on cpu and the session torch.bfloat16 on cpu"):
        session.restore(source.snapshot())
    assert session.length == 7
    assert torch.equal(session.decode(8), twin.decode(8))
    saved = lab.session().snapshot()
    saved.cache.device = torch.device("meta")
    with pytest.raises(InputError, match="float32 on meta and the session torch.float32 on cpu"):
        source.restore(saved)


@pytest.mark.parametrize("layer", range(10))
def test_an_interrupted_pass_changes_nothing(lab, monkeypatch, layer):
    session = lab.session()
    session.prefill(ids_of(11))
    twin = session.fork()

    def ctrl_c(*args, **kwargs):
        raise KeyboardInterrupt

    for ids in (ids_of(1, 3), ids_of(17, 4)):
        monkeypatch.setattr(lab.model.layers[layer].ffn, "forward", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(ids)
        monkeypatch.undo()
        assert session.length == 11 and session.ids == ids_of(11).tolist()
        assert session.nbytes()["global_kv"] == twin.nbytes()["global_kv"]
    for i in ids_of(12, 5).tolist():
        assert torch.equal(session.decode(i), twin.decode(i))


def test_an_interrupt_inside_the_commit_is_finished_later(lab, monkeypatch):
    """Ctrl-C between two parts: the pass is over, so what is left of it is done by whoever asks."""
    for part in range(0, 12, 3):
        session = lab.session()
        session.prefill(ids_of(11))
        twin = session.fork()
        expected = twin.decode(9)
        parts = list(session.cache._recent())
        monkeypatch.setattr(parts[part], "commit", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.decode(9)
        monkeypatch.undo()
        assert session.length == 12 and session.ids[-1] == 9 and expected is not None
        for i in ids_of(6, 5).tolist():
            assert torch.equal(session.decode(i), twin.decode(i))


def raise_interrupt():
    raise KeyboardInterrupt


def test_bytes_are_those_of_the_cache(lab):
    session, c = lab.session(form="plain"), lab.config
    empty = session.nbytes()
    assert set(empty) == PARTS
    assert empty["global_kv"] == empty["index_keys"] == 0
    assert empty["draft"] == 3 * c.sliding_window * c.head_dim * 4      # a window a stage
    assert empty["window"] == c.num_hidden_layers * c.sliding_window * c.head_dim * 4
    session.prefill(ids_of(21))
    for i in ids_of(5, 1):
        session.decode(int(i))
    full = session.nbytes()
    # 26 tokens: layers 2 and 4 hold 13 entries each, layer 6 holds 26.
    assert full["global_kv"] == (13 + 13 + 26) * c.head_dim * 4
    assert full["index_keys"] == (13 + 13 + 26) * c.index_head_dim * 4
    assert full["window"] == empty["window"] and full["reserved"] > 0
    assert full["draft"] == empty["draft"]
    assert lab.session(draft=False).nbytes()["draft"] == 0


def test_refused_input_leaves_the_session_as_it_was(lab):
    session, twin = lab.session(), lab.session()
    session.prefill(ids_of(6))
    twin.prefill(ids_of(6))
    for call, said in (
        (lambda: session.decode(512), "512 is outside the vocabulary"),
        (lambda: session.decode([1, 2]), "one id"),
        (lambda: session.prefill([]), "empty"),
        (lambda: session.prefill(torch.zeros(2, 3).long()), "one sequence"),
        (lambda: session.prefill([0.5]), "whole numbers"),
        (lambda: session.prefill([1] * 4091), "4097 tokens do not fit the context of 4096"),
    ):
        with pytest.raises(InputError, match=said):
            call()
    assert session.length == 6
    assert torch.equal(session.decode(8), twin.decode(8))


def test_the_context_can_be_filled_to_the_last_token(lab):
    small = lab.config.replace(max_position_embeddings=12)
    kept, lab.model.config = lab.model.config, small
    try:
        session = lab.session()
        session.prefill(ids_of(11))
        session.decode(5)
        with pytest.raises(InputError, match="13 tokens do not fit the context of 12"):
            session.decode(5)
    finally:
        lab.model.config = kept


def test_threads_are_given_back(lab):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            assert torch.get_num_threads() == 1
        with pytest.raises(InputError), one_thread():
            raise InputError("x")
        lab.session().prefill(ids_of(4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
