"""The confidences' temperatures: fitted on data whose right answer is known, kept in a file."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.calibration import (
    FILE,
    Calibration,
    calibrated,
    draft_digest,
    load_calibration,
    save_calibration,
)
from labkit.errors import CheckpointError, InputError
from labkit.train.calibration import (
    expected_calibration_error,
    fit_temperatures,
    reliability,
    reliability_by_slot,
    survival_errors,
)

TRUE_TEMPERATURES = (2.0, 0.6, 1.0, 3.0)


def drafts(n: int = 40_000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of slots that really survive with sigmoid(logit / true temperature of the slot)."""
    g = torch.Generator().manual_seed(seed)
    true = torch.randn(n, len(TRUE_TEMPERATURES), generator=g, dtype=torch.float64) * 1.5 + 1.0
    accepted = torch.rand(true.shape, generator=g) < torch.sigmoid(true)
    return true * torch.tensor(TRUE_TEMPERATURES), accepted.cumprod(-1).bool()


def test_known_temperatures_are_found():
    logits, survived = drafts()
    fit = fit_temperatures(logits, survived)
    print("temperatures", [round(t, 3) for t in fit.temperatures],
          "ECE", [round(e, 4) for e in fit.ece_before], [round(e, 4) for e in fit.ece_after])
    for found, true in zip(fit.temperatures, TRUE_TEMPERATURES, strict=True):
        assert found == pytest.approx(true, rel=0.15)
    assert all(after < 0.01 for after in fit.ece_after)
    assert fit.ece_before[0] > 0.05
    # On data that it never saw the gain stays.
    logits, survived = drafts(seed=1)
    assert max(survival_errors(logits, survived, fit.temperatures)) < 0.015
    assert max(survival_errors(logits, survived)) > 0.05


def test_slots_are_fitted_from_the_left_on_the_product():
    """Each choice is the best of the grid for its slot with the slots before it fixed."""
    logits, survived = drafts()
    grid = (0.4, 0.6, 1.0, 2.0, 3.0)
    chosen = list(fit_temperatures(logits, survived, grid=grid).temperatures)
    for slot in range(4):
        errors = {t: survival_errors(logits, survived, [*chosen[:slot], t, *chosen[slot + 1:]])
                  for t in grid}
        assert min(errors, key=lambda t, s=slot: errors[t][s]) == chosen[slot]
    assert tuple(chosen) == (2.0, 0.6, 1.0, 3.0)
    # The columns swapped are other data, and each slot follows its own.
    swapped = fit_temperatures(logits[:, [0, 2, 1, 3]], survived, grid=grid).temperatures
    assert swapped[:2] != tuple(chosen[:2])
    # Slot 2 depends on slot 1 through the product: with slot 1 held wrong, another T is best.
    sure = logits.clone()
    sure[:, 0] = 30.0                                     # "slot 1 always survives": it does not
    assert fit_temperatures(sure, survived, grid=grid).temperatures[1] != chosen[1]


def test_a_slot_with_nothing_to_gain_keeps_temperature_one():
    logits, survived = torch.zeros(50, 2), torch.zeros(50, 2, dtype=torch.bool)
    # sigmoid(0 / T) is a half whatever T is.
    assert fit_temperatures(logits, survived).temperatures == (1.0, 1.0)


def test_error_by_hand():
    predicted = torch.tensor([0.05, 0.15, 0.95, 1.0])
    outcome = torch.tensor([0.0, 1.0, 1.0, 0.0])
    # Ten bins: |.05 - 0| / 4 + |.15 - 1| / 4 + |(.95 + 1) / 2 - .5| * 2 / 4
    wanted = 0.05 / 4 + 0.85 / 4 + (0.975 - 0.5) * 2 / 4
    assert expected_calibration_error(predicted, outcome, bins=10) == pytest.approx(wanted)
    bars = reliability(predicted, outcome, bins=10)
    assert [b.count for b in bars] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert bars[9].predicted == pytest.approx(0.975) and bars[9].observed == 0.5
    assert bars[4].predicted is None and bars[4].observed is None
    assert (bars[0].low, bars[9].high) == (0.0, 1.0)
    # One bin compares the means alone.
    assert expected_calibration_error(predicted, outcome, bins=1) == pytest.approx(
        abs(float(predicted.mean() - outcome.mean())))


def test_a_sure_and_right_prediction_has_no_error():
    y = torch.tensor([0.0, 1.0, 1.0])
    assert expected_calibration_error(y, y) == 0.0
    assert expected_calibration_error(1 - y, y) == 1.0


logit_rows = st.lists(st.lists(st.floats(-8, 8), min_size=3, max_size=3), min_size=1, max_size=30)
temperatures = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)


@given(logit_rows, temperatures)
def test_survival_falls_along_the_slots_and_order_within_a_slot_stays(rows, temps):
    logits = torch.tensor(rows, dtype=torch.float64)
    c = calibrated(logits, temps)
    assert ((c >= 0) & (c <= 1)).all()
    a = c.cumprod(-1)
    assert (a[:, 1:] <= a[:, :-1]).all()
    for slot in range(3):
        order = logits[:, slot].argsort(stable=True)
        assert (c[order, slot].diff() >= 0).all()


@given(logit_rows)
def test_temperature_one_is_the_identity(rows):
    logits = torch.tensor(rows, dtype=torch.float64)
    assert torch.equal(calibrated(logits, [1.0, 1.0, 1.0]), torch.sigmoid(logits))


@given(logit_rows, st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_bars_and_error_are_one_thing(rows, lengths):
    logits = torch.tensor(rows, dtype=torch.float64)
    kept = torch.tensor(lengths[: len(rows)])[:, None]
    survived = torch.arange(3) < kept
    errors = survival_errors(logits, survived)
    fit = fit_temperatures(logits, survived)
    assert all(0 <= e <= 1 for e in (*errors, *fit.ece_after))
    assert fit.ece_after[0] <= fit.ece_before[0] + 1e-12  # 1 is on the grid; later slots may lose
    for bars, error in zip(reliability_by_slot(logits, survived), errors, strict=True):
        assert sum(b.count for b in bars) == len(rows)
        total = sum(b.count * abs(b.predicted - b.observed) for b in bars if b.count)
        assert total / len(rows) == pytest.approx(error, abs=1e-12)


def test_temperatures_of_other_numbers_of_slots():
    logits = torch.tensor([[2.0, 2.0, 2.0]])
    longer = calibrated(logits, [1.0, 2.0])  # a longer block: the last temperature goes on
    assert torch.allclose(longer, torch.sigmoid(torch.tensor([[2.0, 1.0, 1.0]])))
    assert torch.equal(calibrated(logits[:, :1], [1.0, 2.0]), torch.sigmoid(logits[:, :1]))
    assert calibrated(logits.bfloat16(), [1.0]).dtype == torch.float32


@pytest.mark.parametrize("temps", [[], [0.0], [1.0, -1.0], [math.nan], [math.inf]])
def test_unusable_temperatures(temps):
    with pytest.raises(InputError, match="above 0"):
        calibrated(torch.zeros(1, 1), temps)
    with pytest.raises(InputError, match="above 0"):
        fit_temperatures(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), grid=temps)


@pytest.mark.parametrize(("logits", "survived", "word"), [
    (torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool), "not empty"),
    (torch.zeros(3), torch.zeros(3, dtype=torch.bool), "drafts, slots"),
    (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.bool), "drafts, slots"),
    (torch.zeros(3, 2), torch.zeros(3, 2), "True or False"),
    (torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 2, dtype=torch.bool), "NaN"),
    (torch.zeros(1, 2), torch.tensor([[False, True]]), "True behind False"),
])
def test_bad_drafts(logits, survived, word):
    with pytest.raises(InputError, match=word):
        fit_temperatures(logits, survived)


def test_bad_predictions():
    half = torch.full((2,), 0.5)
    for predicted, observed, bins, word in (
        (half, half[:1], 15, "one shape"), (half, half, 0, "at least 1"),
        (half + 1, half, 15, "predictions must"), (half, half - 1, 15, "outcomes must"),
        (half * math.nan, half, 15, "predictions must"),
    ):
        with pytest.raises(InputError, match=word):
            expected_calibration_error(predicted, observed, bins)


# ---- the file -------------------------------------------------------------------------------

WEIGHT = torch.linspace(-1, 1, 12)[None]


def calibration(slots: int = 2) -> Calibration:
    return Calibration((1.5,) * slots, (0.2,) * slots, (0.1,) * slots,
                       {"text": "held out", "drafts": 10}, draft_digest(WEIGHT), "a target")


def test_the_file_gives_back_what_was_saved(tmp_path):
    assert load_calibration(tmp_path, 2) is None
    path = save_calibration(tmp_path, calibration())
    assert path.name == FILE and [p.name for p in tmp_path.iterdir()] == [FILE]
    assert load_calibration(tmp_path, 2) == calibration()
    assert load_calibration(tmp_path, 2, WEIGHT) == calibration()


def test_a_draft_is_known_by_its_released_values():
    assert draft_digest(WEIGHT) == draft_digest(WEIGHT.bfloat16().double())
    assert draft_digest(WEIGHT) != draft_digest(WEIGHT * 1.01)


def test_a_file_of_another_draft_is_refused(tmp_path):
    save_calibration(tmp_path, calibration())
    with pytest.raises(CheckpointError, match="2 slots, the draft has 5"):
        load_calibration(tmp_path, 5)
    with pytest.raises(CheckpointError, match="another draft"):
        load_calibration(tmp_path, 2, WEIGHT + 0.5)
    with pytest.raises(CheckpointError, match="trained for another model"):
        load_calibration(tmp_path, 2, WEIGHT, "another target")
    assert load_calibration(tmp_path, 2, WEIGHT, "a target") == calibration()


@pytest.mark.parametrize(("change", "word"), [
    (lambda raw: raw.pop("temperatures"), "'temperatures' is missing"),
    (lambda raw: raw.pop("fitted_on"), "'fitted_on' is missing"),
    (lambda raw: raw.update(temperatures=[1.0, 0.0]), "above 0"),
    (lambda raw: raw.update(temperatures=[1.0, "2"]), "list of numbers"),
    (lambda raw: raw.update(temperatures=1.0), "list of numbers"),
    (lambda raw: raw.update(temperatures=[]), "above 0"),
    (lambda raw: raw.update(temperatures=[True, 1.0]), "list of numbers"),
    (lambda raw: raw.update(ece_after=[0.1]), "ece_after must be 2 numbers"),
    (lambda raw: raw.update(ece_before=[0.1, 2.0]), "ece_before must be 2 numbers"),
    (lambda raw: raw.update(draft=None), "draft and target strings"),
])
def test_a_malformed_file_says_what_is_wrong(tmp_path, change, word):
    raw = calibration().to_dict()
    change(raw)
    (tmp_path / FILE).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=word):
        load_calibration(tmp_path, 2)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", "\ud800"])
def test_a_file_that_is_no_json_object(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match="is not a calibration"):
        load_calibration(tmp_path, 2)
