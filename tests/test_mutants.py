"""Each deliberate fault is noticed by a property and by a vector; right code passes all checks."""

import pytest
import torch

from labkit import mutants
from labkit.errors import InputError
from labkit.mutants import checks, kill, record
from labkit.mutants.models import random_ids, random_model, small_config

# The published kinds of bug that must be among them, whatever else is.
REQUIRED = {
    "ReLU before the sum": ["relu_after_sum"],
    "padding in top-k": ["finite_mask", "minus_one_reads_last"],
    "newest block": ["newest_block_not_pinned", "ragged_block_pads_zero"],
    "key before rotation": ["index_key_from_rotated_latent"],
    "position of an entry": ["entry_at_last_token"],
    "inverse rotation": ["no_inverse_rotation"],
    "partial groups": ["gates_left_behind"],
    "YaRN": ["yarn_in_every_layer", "yarn_nowhere", "yarn_amplitude"],
    "pre lags": ["pre_does_not_lag"],
    "transposed mixing": ["transposed_comb"],
    "epsilon of the input norm": ["hc_eps_in_norm"],
    "routing bias": ["bias_in_weights", "image_bias_unused"],
    "SwiGLU limit": ["gate_clamped_below", "up_unclamped_below", "shared_expert_unlimited"],
    "place of the routing weight": ["weight_after_down"],
    "class map": ["case_kept", "lone_space_lost"],
    "look-back across passes": ["lookback_forgotten"],
    "nibble order": ["high_nibble_first"],
    "ties to even": ["ties_away"],
    "cuts between a source and its readers": ["ced_keeps_first_candidates",
                                              "ced_keeps_first_selection"],
    "chunks of queries": ["query_chunks_start_anew", "query_chunks_share_pool_rows"],
    "crop over a group": ["crop_keeps_windows", "crop_keeps_cut_group"],
    "replay inside a pair": ["replay_rewrites_entries"],
    "hit without windows": ["hit_without_replay", "replay_one_token_late"],
    "restored means restored": ["snapshot_shares_entries", "fork_shares_remainder"],
    "rejected drafts": ["rewind_forgets_windows", "rewind_forgets_remainder",
                        "rewind_forgets_lookback", "rewind_forgets_entries"],
    "rejected drafts, unseen in the text": ["rewind_forgets_draft_windows",
                                            "rewind_keeps_first_rejected"],
    "features of a draft": ["draft_features_one_layer_late", "draft_features_before_engram",
                            "draft_features_first_stream"],
    "empty draft window": ["replay_leaves_draft_empty", "hit_without_draft_windows",
                           "draft_reads_void_window"],
    "released confidence head": ["draft_confidence_normalised"],
    "scheduler that looks ahead": ["scheduler_looks_ahead", "threshold_looks_ahead",
                                   "budget_of_today"],
    "verification": ["residual_not_subtracted", "residual_not_clipped", "accept_without_ratio",
                     "bonus_from_draft", "bonus_one_row_early"],
}


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutant_is_killed(name, mutant_rows):
    row = mutants.judge(name, vectors=True)
    mutant_rows.append(row)
    assert row.property_check, f"no property notices: {row.fault}"
    if row.no_vector:
        assert not row.vector_check, f"a vector does notice it ({row.vector_says}): say so"
    else:
        assert row.vector_check, f"no vector notices: {row.fault}"
    for said in (row.property_says, row.vector_says or ""):
        assert "stops with" not in said, f"noticed by a crash only: {said}"


def test_right_code_passes_every_check_also_afterwards():
    assert kill.failures(vectors=True) == {}


def test_all_required_faults_are_there():
    wanted = {name for names in REQUIRED.values() for name in names}
    assert len(REQUIRED) >= 18 and wanted <= set(mutants.MUTANTS)


def test_each_record_is_complete():
    for mutant in mutants.MUTANTS.values():
        for text in (mutant.fault, mutant.mechanism, mutant.source, mutant.look,
                     mutant.no_vector or "none"):
            assert len(text) > 3, mutant.id
        assert mutant.fault.endswith(".") and mutant.fault.count(". ") == 0, mutant.id
        assert mutant.patches(), mutant.id
    faults = [mutant.fault for mutant in mutants.MUTANTS.values()]
    assert len(set(faults)) == len(faults)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_switching_off_puts_everything_back(name):
    record._import_all()
    places = [(p.owner, p.name) for p in mutants.find(name).patches()]
    before = [vars(owner)[key] for owner, key in places]
    with pytest.raises(ZeroDivisionError):
        with mutants.active(name):
            assert all(vars(owner)[key] is not old
                       for (owner, key), old in zip(places, before, strict=True))
            raise ZeroDivisionError
    assert all(vars(owner)[key] is old for (owner, key), old in zip(places, before, strict=True))


def test_a_fault_in_a_kernel_is_in_every_set():
    config = small_config()
    ids = random_ids(config, 29, seed=3)
    for name in ("relu_after_sum", "minus_one_reads_last", "window_one_short", "sink_left_out",
                 "ties_to_the_later"):
        logits = {}
        for kernels in ("reference", "cpu"):
            model = random_model(config, 1, kernel_set=kernels)
            with torch.no_grad():
                right = model(ids).logits
                with mutants.active(name):
                    logits[kernels] = model(ids).logits
            assert float((logits[kernels] - right).abs().max()) > 1e-3, (name, kernels)
        assert torch.allclose(*logits.values(), atol=1e-9), name


def test_one_at_a_time_and_by_name():
    with mutants.active("ties_away"):
        with pytest.raises(InputError, match="ties_away is active"):
            with mutants.active("sink_left_out"):
                pass
    with pytest.raises(InputError, match="unknown mutant 'nonsense'.*relu_after_sum"):
        with mutants.active("nonsense"):
            pass


def test_a_module_imported_later_cannot_keep_a_fault():
    """Everything that could look the function up is imported before it is replaced."""
    import sys

    with mutants.active("half_split_pairs"):
        import labkit.model.rope as rope
        wrong = rope.rotate
    for name, module in sys.modules.items():
        if name.startswith("labkit."):
            assert wrong not in vars(module).values(), name


def test_the_table_names_survivors_and_missing_vectors(monkeypatch):
    row = kill.Row("a", "Something is wrong.", "oracle", "x", "text", "y", True)
    alive = kill.Row("b", "Something else.", "oracle", "x", None, None, True)
    assert row.killed and not alive.killed
    text = mutants.main_text([row, alive])
    assert text.splitlines()[-1] == "2 mutants, 1 SURVIVE: b"
    assert mutants.main_text([row]).splitlines()[-1] == "1 mutants, all killed"
    alone = kill.Row("d", "Fourth.", "replay", "x", None, None, True, "it has no numbers for it")
    assert alone.killed and not kill.Row("d", "", None, None, None, None, True, "none").killed
    lines = mutants.main_text([row, alone]).splitlines()
    assert lines[-2].startswith("1 of them by a property alone")
    assert lines[-1] == "2 mutants, all killed"
    assert "no vector" in lines[3] and "No vector: it has no numbers for it." in lines[4]
    unseen = kill.Row("c", "Third.", "oracle", "x", None, None, False)
    from labkit.mutants import golden

    monkeypatch.setattr(golden, "available", lambda: False)
    text = mutants.main_text([unseen])
    assert unseen.killed and "not run" in text and "only properties were run" in text
    with pytest.raises(InputError, match="tests/golden"):
        golden.folder()


def test_checks_notice_nan_and_crashes():
    from labkit.mutants import rules

    nan = torch.tensor([1.0, float("nan")])
    assert rules.close("x", torch.ones(2), nan, 1.0)
    assert rules.close_but_flips("x", torch.ones(2), nan)
    assert rules.close("x", torch.ones(2), torch.ones(3), 1.0)

    def crash():
        raise ValueError("shapes")

    assert checks.Check("c", "", crash).failure() == "stops with ValueError: shapes"


def test_the_command_prints_the_table_and_the_record():
    from typer.testing import CliRunner

    from labkit.cli import app

    result = CliRunner().invoke(app, ["mutants", "transposed_comb", "case_kept"])
    assert result.exit_code == 0, result.output
    assert "Doubly stochastic matrices keep sums either way" in result.output
    assert result.stdout.splitlines()[-1] == "2 mutants, all killed"
    result = CliRunner().invoke(app, ["mutants", "nonsense"])
    assert result.exit_code == 1 and "unknown mutant 'nonsense'" in result.stderr


def test_nothing_is_judged_while_right_code_fails(monkeypatch):
    broken = checks.Check("broken", "", lambda: "off by one")
    monkeypatch.setitem(checks.PROPERTIES, "broken", broken)
    with pytest.raises(InputError, match="broken .off by one.: repair the model"):
        mutants.table(["case_kept"])
