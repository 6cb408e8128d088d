"""Four facts of every exercise: the stub fails, the solution passes, so does another correct
answer, and every known mistake fails with its own sentence. And the checker's words."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import labkit
from labkit.errors import InputError, LabError
from labkit.exercises import NotStarted, Wrong, check, exercises, find, progress
from labkit.exercises.compare import difference
from labkit.exercises.judge import judge

ROOT = Path(__file__).resolve().parents[1]
ALL = exercises()
each = pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cells = tool("exercise_cells")


@pytest.fixture(scope="module")
def lab():
    return labkit.load("mini", device="cpu")


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))


def defined(code, exercise):
    """The function that a cell with this code defines, given what notebooks import."""
    import re as regular_expressions
    import unicodedata

    import torch.nn.functional as F
    names = {"torch": torch, "re": regular_expressions, "unicodedata": unicodedata, "F": F}
    exec(code, names)  # noqa: S102
    return names[exercise.function]


# ---- the four facts ----------------------------------------------------------------------------
@each
def test_the_stub_fails_and_says_that_it_is_one(exercise, lab):
    stub = defined(cells.stub(cells.read_task(exercise.id)), exercise)
    with pytest.raises(NotStarted, match="not started"):
        judge(exercise, stub, lab)


@each
def test_the_solution_passes_as_it_stands_in_the_notebook(exercise, lab):
    found = judge(exercise, defined(cells.solution(cells.read_task(exercise.id)), exercise), lab)
    assert found.cases >= 2 and exercise.title in str(found)


@each
def test_another_correct_answer_passes(exercise, lab):
    judge(exercise, exercise.alternative, lab)


@each
def test_every_mistake_fails_with_its_own_sentence(exercise, lab):
    assert len(exercise.mistakes) >= 2
    for mistake in exercise.mistakes:
        with pytest.raises(Wrong) as told:
            judge(exercise, mistake.function, lab)
        assert told.value.said == mistake.says, mistake.function.__name__
        assert mistake.seen


# ---- their form --------------------------------------------------------------------------------
def test_numbers_and_names_are_their_own():
    for field in ("id", "number", "title", "function"):
        values = [getattr(e, field) for e in ALL]
        assert len(set(values)) == len(values), field


@each
def test_the_form(exercise):
    task = cells.read_task(exercise.id)
    assert re.fullmatch(r"\d+\.\d", exercise.number)
    assert 5 <= exercise.minutes <= 40 and exercise.difficulty in range(1, 6)
    assert exercise.importance in range(1, 6)
    assert len(exercise.help) == 3 and all(len(text) > 60 for text in exercise.help)
    assert "cannot see" in " ".join(exercise.after.split())
    code = cells.solution(task).splitlines()
    assert len(code) <= 20 and max(map(len, code)) <= 88
    last = cells.stub(task).splitlines()[-1]
    assert last.startswith("    raise NotImplementedError(")
    asked, stub, checked, helped = cells.cells(exercise.id, solved=False)
    assert "raises-exception" in checked["metadata"]["tags"]
    assert "".join(helped["source"]).count("<details>") == 5
    assert "solution" not in "".join(stub["source"])
    assert "tags" not in cells.cells(exercise.id, solved=True)[2]["metadata"]


def test_paragraphs_are_set_anew_and_code_is_not():
    long = "word " * 40
    text = f"""first line of
    {long}

    ```python
    {long.strip()}
        indented
    ```
    behind it"""
    lines = cells._text(text).split("\n")
    assert lines[0].startswith("first line of word") and max(map(len, lines[:3])) <= cells.WIDTH
    assert lines[lines.index("```python") + 1] == long.strip()
    assert "    indented" in lines and lines[-1] == "behind it"


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(ValueError, match="no exercise 'engram_row'"):
        cells.read_task("engram_row")
    (tmp_path / "bare.py").write_text('NUMBER = "1.1"\n')
    with pytest.raises(ValueError, match="bare.py lacks TITLE"):
        cells.read_task("bare", tmp_path)
    with pytest.raises(InputError, match="did you mean.*engram_rows"):
        find("engram_row")


# ---- what the checker says ---------------------------------------------------------------------
def test_a_misconception_is_named_and_an_unknown_error_is_located(lab):
    exercise = find("engram_rows")
    with pytest.raises(Wrong) as told:
        judge(exercise, exercise.mistakes[0].function, lab)
    text = str(told.value)
    assert "Checked: all orders inside a text" in text and "first at [" in text
    assert "belongs to the newest" in text
    assert told.value._render_traceback_() == text.split("\n")     # what a notebook shows
    with pytest.raises(Wrong, match=r"IndexError in line \d+ \(return classes\[10\*\*6\]\)"):
        def attempt(classes, *more):
            return classes[10**6]
        judge(exercise, attempt, lab)
    with pytest.raises(Wrong, match="got None .is a return missing"):
        judge(exercise, lambda *args: None, lab)
    with pytest.raises(Wrong, match=r"expected shape \[\d+, 3, 2\], got \[\d+, 6\]"):
        judge(exercise, lambda *args: exercise.solution(*args).flatten(1), lab)
    with pytest.raises(Wrong, match=r"expected numbers of torch.int64, got torch.float32"):
        judge(exercise, lambda *args: exercise.solution(*args).float(), lab)


def test_arguments_may_not_be_changed(lab):
    exercise = find("engram_rows")

    def attempt(classes, *more):
        found = exercise.solution(classes, *more)
        classes += 1
        return found
    with pytest.raises(Wrong, match="changes its arguments in place"):
        judge(exercise, attempt, lab)


@pytest.mark.parametrize("actual, expected, tolerance, told", [
    (3, 3, 0.0, None), (3, 4, 0.0, "expected 4, got 3"), (1.0, 1.0001, 1e-3, None),
    (1.0, 1.01, 1e-3, "expected 1.01, got 1"), ("a", "b", 0.0, "expected 'b', got 'a'"),
    ([1, 2], [1, 2], 0.0, None), ((1, 2), [1, 3], 0.0, r"expected 3 at \[1\], got 2"),
    ([1], [1, 2], 0.0, "expected 2 elements, got 1"),
    (True, 1, 0.0, "got True"), ({"a": 1}, {"a": 1, "b": 2}, 0.0, "'b' is missing"),
    ({"a": 1, "b": 2}, {"a": 1}, 0.0, "'b' too many"), (torch.tensor(2), 2, 0.0, None),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), 1e-2, r"1 of 2 .*first at \[1\]"),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001]), 1e-3, None),
    (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]), 0.0, None),
    (torch.tensor([float("nan")]), torch.tensor([1.0]), 1e-3, "got nan"),
    (torch.tensor([True]), torch.tensor([1]), 0.0, "expected numbers of torch.int64"),
    (torch.tensor([1, 2]), [1, 2], 0.0, None), (5, torch.tensor([1]), 0.0, "tensor of shape"),
    ("x", [1], 0.0, "expected a list"), (None, 1.5, 0.0, "is a return missing"),
])
def test_differences_in_words(actual, expected, tolerance, told):
    found = difference(actual, expected, tolerance)
    assert (found is None) if told is None else re.search(told, found), found


# ---- progress ----------------------------------------------------------------------------------
def test_attempts_and_the_first_day_of_success_are_kept(lab):
    exercise = find("engram_class_text")
    assert progress.read() == {}
    with pytest.raises(NotStarted):
        check(exercise.id, defined(cells.stub(cells.read_task(exercise.id)), exercise), lab)
    assert progress.read() == {}                        # running a stub is no attempt
    with pytest.raises(Wrong):
        check(exercise.id, str.lower, lab)
    assert "1 attempt so far" in progress.table(ALL, progress.read())
    check(exercise.id, exercise.solution, lab)
    entry = progress.read()[exercise.id]
    assert entry["attempts"] == 2 and entry["passed"]
    text = progress.table(ALL, progress.read())
    assert f"\u2713 {exercise.number}" in text and f"1 of {len(ALL)} exercises done" in text
    assert progress.reset() and not progress.reset() and progress.read() == {}


def test_a_spoilt_record_is_told_and_stops_nobody(lab):
    path = progress.progress_file()
    path.write_text("[1]")
    with pytest.raises(LabError, match="is not a record of progress.*--reset"):
        progress.read()
    check("engram_class_text", find("engram_class_text").solution, lab)
    assert path.read_text() == "[1]"
    path.write_text(json.dumps({"x": {"attempts": 1}}))
    with pytest.raises(LabError):
        progress.read()
