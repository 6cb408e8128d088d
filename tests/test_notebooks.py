"""Notebooks as files: built from their sources, within their limits, and really run by nbval."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=60", "-p", "no:cacheprovider"]

SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, run_solutions = tool("build_notebooks"), tool("run_solutions")


def read(path):
    return nbformat.read(path, as_version=4)


def code_of(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def text_of(path):
    return "\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# ---------------------------------------------------------------------------------- building
def test_there_are_notebooks_and_all_are_what_their_sources_say():
    assert [path.name for path in NOTEBOOKS][:1] == ["00_start.ipynb"]
    assert build.drifted() == []


SOURCE = '''# A comment before the first cell.

# %% [markdown] id="question"
# # Why?
#
# Because.

# %% id="answer" tags=["nbval-check-output"]
x = 6 * 7
print(x)
'''


def test_a_source_becomes_a_valid_notebook():
    made = nbformat.reads(build.notebook(SOURCE), as_version=4)
    nbformat.validate(made)
    question, answer = made.cells
    assert (question.id, question.source) == ("question", "# Why?\n\nBecause.")
    assert (answer.id, answer.source) == ("answer", "x = 6 * 7\nprint(x)")
    assert answer.metadata.tags == ["nbval-check-output"]
    assert answer.execution_count is None and answer.outputs == []


@pytest.mark.parametrize("wrong, told", [
    ("# %%\nx = 1\n", "line 1: the cell's id is missing"),
    ('# %% id="a"\n\n# %% id="a"\n', "line 3: the cell's id is used twice"),
    ('x = 1\n# %% id="a"\n', "line 1: text before the first cell"),
    ('# %% [markdown] id="a"\n# yes\nno\n', "cell a: a text line without '# ': no"),
])
def test_a_wrong_source_is_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        build.notebook(wrong)


def test_drift_is_noticed(tmp_path):
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "notebooks" / "src" / "01_a.py").write_text(SOURCE, encoding="utf-8")
    target = tmp_path / "notebooks" / "01_a.ipynb"
    solved = tmp_path / "notebooks" / "solutions" / "01_a.ipynb"
    solved.parent.mkdir()
    assert build.drifted(tmp_path) == [target, solved]  # not built yet
    for path in (target, solved):
        path.write_text(build.notebook(SOURCE), encoding="utf-8")
    assert build.drifted(tmp_path) == []
    target.write_text(build.notebook(SOURCE.replace("6 * 7", "6 * 8")), encoding="utf-8")
    assert build.drifted(tmp_path) == [target]
    target.write_text(build.notebook(SOURCE), encoding="utf-8")
    # A solution keeps its outputs, a learner's notebook has none.
    ran = json.loads(build.notebook(SOURCE))
    ran["cells"][1] |= {"execution_count": 1, "outputs": [
        {"output_type": "stream", "name": "stdout", "text": ["42\n"]}]}
    for path in (target, solved):
        path.write_text(json.dumps(ran), encoding="utf-8")
    assert build.drifted(tmp_path) == [target]
    target.write_text(build.notebook(SOURCE), encoding="utf-8")
    for stray in (target.with_name("02_b.ipynb"), solved.with_name("02_b.ipynb")):
        stray.write_text("{}", encoding="utf-8")
        assert stray in build.drifted(tmp_path)


def test_an_exercise_stands_as_stub_and_as_solution():
    source = SOURCE + '\n# %% exercise="engram_rows"\n\n# %% id="after"\nx + 1\n'
    learner, solved = (nbformat.reads(build.notebook(source, solved=s), as_version=4)
                       for s in (False, True))
    for made in (learner, solved):
        nbformat.validate(made)
    assert [c.id for c in learner.cells] == [c.id for c in solved.cells] == [
        "question", "answer", "ex-2-1", "ex-2-1-code", "ex-2-1-check", "ex-2-1-help", "after"]
    assert "raise NotImplementedError" in learner.cells[3].source
    assert "raise NotImplementedError" not in solved.cells[3].source
    assert learner.cells[4].source == solved.cells[4].source == 'check("engram_rows", rows_of)'
    assert learner.cells[5].source.count("<summary>") == 5
    for wrong, told in (('# %% exercise="nothing"\n', "no exercise 'nothing'"),
                        ('# %% exercise="engram_rows"\n' * 2, "stands here twice"),
                        ('# %% exercise="engram_rows"\nx = 1\n', "text behind an exercise")):
        with pytest.raises(ValueError, match=told):
            build.notebook(wrong)


# ---------------------------------------------------------------------------------- limits
@each
def test_form_and_size(path):
    raw = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(read(path))
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
    assert (raw["nbformat"], raw["nbformat_minor"]) == (4, 5)
    assert raw["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in raw["metadata"]  # no saved widget state
    assert path.stat().st_size < 300 * 1024
    ids = [cell["id"] for cell in raw["cells"]]
    assert len(set(ids)) == len(ids) and 30 <= len(ids) <= 60
    for cell in raw["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_were_run(path):
    assert run_solutions.has_run(path), "run tools/run_solutions.py"
    assert path.stat().st_size <= run_solutions.LARGEST
    assert "application/vnd.jupyter.widget-view+json" not in path.read_text(encoding="utf-8")


def test_the_tool_knows_what_has_not_been_run(tmp_path):
    path = tmp_path / "01_a.ipynb"
    path.write_text(build.notebook(SOURCE), encoding="utf-8")
    assert not run_solutions.has_run(path)
    run_solutions.run(path)
    assert run_solutions.has_run(path)
    assert build.without_outputs(path.read_text(encoding="utf-8")) == build.notebook(SOURCE)
    path.write_text(build.notebook(SOURCE.replace("print(x)", "1 / 0")), encoding="utf-8")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        run_solutions.run(path)
    assert not run_solutions.has_run(path)               # left as it was
    with pytest.raises(ValueError, match="no solution begins with 99"):
        run_solutions.solutions(["99"])


@each
def test_cells_are_short(path):
    code = [cell.source.splitlines() for cell in code_of(path)]
    assert sum(len(lines) for lines in code) < 300
    assert max(len(lines) for lines in code) <= 20
    assert max(len(line) for lines in code for line in lines) <= 88
    assert max(len(line) for line in text_of(path).splitlines()) <= 88


@each
def test_facts_are_asserted(path):
    """nbval-lax notices errors only: what must hold is an assert in a cell."""
    code = [cell.source for cell in code_of(path)]
    assert sum("assert " in source for source in code) >= 8
    # An error may come from the check of an exercise that is not done, and from nothing else.
    for cell in code_of(path):
        raises = "raises-exception" in cell.metadata.get("tags", [])
        assert raises == bool(re.fullmatch(r'check\("\w+", \w+\)', cell.source)), cell.source


@each
def test_a_prediction_comes_before_its_reveal(path):
    cells = read(path).cells
    guesses = [i for i, c in enumerate(cells) if c.source.startswith("guess = ")]
    assert len(guesses) >= 4
    for i in guesses:
        assert cells[i - 1].cell_type == "markdown" and "**Predict.**" in cells[i - 1].source
        assert "your guess" in cells[i + 1].source


@each
def test_headings_have_no_jumps_and_pictures_have_words(path):
    levels = [len(m) for m in re.findall(r"^(#+) ", text_of(path), re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))
    assert re.findall(r"!\[\s*\]\(", text_of(path)) == []
    assert "<img" not in text_of(path)


@each
def test_it_says_what_it_does_not_show_and_where_it_is_from(path):
    for heading in ("## What this lesson does not show", "## Sources"):
        assert heading in text_of(path)


@each
def test_source_shown_is_not_a_copy(path):
    """Code of the package is shown with inspect, so no cell defines what labkit defines."""
    for cell in code_of(path):
        if "exercise" not in cell.metadata.get("tags", []):
            assert not re.search(r"^(def|class) ", cell.source, re.MULTILINE)
    assert any("inspect.getsource" in cell.source for cell in code_of(path))


# ---------------------------------------------------------------------------------- running
def nbval(path, *options):
    command = [sys.executable, "-m", "pytest", *NBVAL, "--rootdir", str(path.parent), *options,
               str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent, timeout=300)


@each
def test_nbval_collects_every_code_cell(path):
    listed = nbval(path, "--collect-only", "-q").stdout
    assert listed.count(f"{path.name}::") == len(code_of(path)) > 15


def test_nbval_notices_errors_also_in_callbacks(tmp_path):
    source = '''# %% id="good"
import ipywidgets
slider = ipywidgets.IntSlider()
slider.observe(lambda change: 1 / (change["new"] - 5), names="value")

# %% id="bad"
assert 1 == 2, "noticed"

# %% id="callback"
slider.value = 5
'''
    path = tmp_path / "trial.ipynb"
    path.write_text(build.notebook(source), encoding="utf-8")
    result = nbval(path, "-q")
    assert "2 failed, 1 passed" in result.stdout, result.stdout[-2000:]
    assert "noticed" in result.stdout and "ZeroDivisionError" in result.stdout


MEASURE = """
import asyncio, json, os, resource, sys, time
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
started = time.perf_counter()
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "bytes": peak,
                  "counts": [c.execution_count for c in notebook.cells if c.cell_type == "code"]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@each
def test_time_and_memory_of_a_run(path, capsys):
    command = [sys.executable, "-c", MEASURE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{path.name}: {found['seconds']:.0f} s, {found['bytes'] / 1e9:.2f} GB "
              "(aims: 60 s, 1.2 GB)")
    assert found["counts"] == list(range(1, len(code_of(path)) + 1))
    assert found["bytes"] <= 1.2e9


def test_the_check_of_drift_needs_no_packages():
    command = [sys.executable, "-S", str(ROOT / "tools/build_notebooks.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr
