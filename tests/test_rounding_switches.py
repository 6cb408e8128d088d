"""Each cache quantiser can be on or off by itself."""

import itertools
import warnings

import pytest
import torch

import labkit
from labkit.errors import InputError
from labkit.numerics import FORMATS, fake_quantize, rounds
from labkit.train.controls import cache_rounding

TEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune"
TAP = {"fp8": "layers.0.attn.window", "nvfp4": "layers.1.attn.compressed_kv",
       "mxfp4": "layers.1.attn.index_keys"}


@pytest.fixture(scope="module")
def lab():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return labkit.load("mini", device="cpu")


def test_names_say_which_are_on():
    for name in FORMATS:
        assert rounds(True, name) and not rounds(False, name) and not rounds(set(), name)
        assert rounds({name}, name) and not rounds(set(FORMATS) - {name}, name)


@pytest.mark.parametrize("on", [set(s) for n in range(4) for s in itertools.combinations(TAP, n)],
                         ids=lambda on: "+".join(sorted(on)) or "none")
def test_a_set_rounds_what_it_names_and_nothing_else(lab, on):
    with cache_rounding(lab.model, on):
        run = lab.trace(TEXT)
        form = lab.model.new_cache().form
    for name, tap in TAP.items():
        x = run[tap]
        assert torch.equal(x, fake_quantize(x, name)) == (name in on), name
    queries = run["layers.1.attn.index_queries"]
    assert torch.equal(queries, fake_quantize(queries, "mxfp4")) == ("mxfp4" in on)
    assert form == ("packed" if len(on) == 3 else "plain")
    if len(on) in (0, 3):
        with cache_rounding(lab.model, bool(on)):
            assert torch.equal(lab.trace(TEXT)["logits"], run["logits"])


def test_an_unknown_name_and_a_form_that_cannot_hold_the_values_are_refused(lab):
    with cache_rounding(lab.model, {"fp4"}), pytest.raises(InputError, match="'fp4': choose one"):
        lab.trace(TEXT)
    with cache_rounding(lab.model, {"fp8"}):
        with pytest.raises(InputError, match="cache rounding is off"):
            lab.session("packed")
        lab.session().prefill(lab.encode(TEXT))


@pytest.mark.parametrize("form", ("packed", "fp8", "bf16", "plain"))
def test_a_trace_through_a_form_is_what_a_session_of_it_reads(lab, form):
    ids = lab.encode(TEXT)
    run = lab.trace(ids, form=form)
    assert torch.equal(run["logits"], lab.session(form).prefill(ids))
    entries = run["layers.1.attn.compressed_kv"]
    assert torch.equal(entries, fake_quantize(entries, "nvfp4")) == (form != "fp8")
    assert torch.equal(lab.trace(ids)["logits"], lab.trace(ids, form="plain")["logits"])


def test_a_trace_of_two_rows_through_a_form(lab):
    ids = torch.tensor([lab.encode(TEXT)])
    both = lab.trace(ids.expand(2, -1), form="packed")["logits"]
    assert torch.allclose(both[0], lab.trace(ids, form="packed")["logits"][0], atol=1e-3)
    with pytest.raises(InputError, match="cache form is 'zip'"):
        lab.trace(ids, form="zip")
