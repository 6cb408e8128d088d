"""The closing summary and the rule for tests that need a browser, seen from outside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLE = '''
import pytest

def test_fine(mutant_rows):
    from labkit.mutants import Row
    mutant_rows.append(Row("made_up", "A fault.", "oracle", "x", "text", "y", True))

@pytest.mark.parametrize("n", range(3))
def test_skips(n):
    pytest.skip("no such thing here")

def test_browser(chromium_path):
    assert chromium_path
'''


def run(folder, **environment):
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "LABKIT_BROWSER")}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."], cwd=folder,
        env={**env, **environment}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


def test_cells_skips_and_mutants_are_told_and_the_last_line_is_pytest_s(tmp_path):
    code, lines = run(tmp_path, LABKIT_BROWSER=str(tmp_path / "none"))
    assert code == 0, lines
    assert "0 notebook cells collected" in lines
    assert "4 skipped" in lines
    assert "  3 x no such thing here" in lines
    assert any("1 x" in line and ("no Chromium" in line or "playwright" in line) for line in lines)
    assert "1 mutants, all killed" in lines
    assert lines[-1].startswith("1 passed, 4 skipped in ")


def test_without_a_browser_ci_fails(tmp_path):
    code, lines = run(tmp_path, LABKIT_BROWSER=str(tmp_path / "none"), CI="true")
    assert code == 1
    assert any("with CI=true the browser tests must run" in line for line in lines)
    assert lines[-1].startswith("1 failed, 1 passed, 3 skipped in ") or "1 error" in lines[-1]


def test_notebook_cells_are_counted(tmp_path):
    pytest.importorskip("nbval")
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1") for _ in range(2)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "python3"}
    nbformat.write(book, tmp_path / "two.ipynb")
    shutil.copy(HERE / "conftest.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax",
         "--collect-only", "."], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    assert "2 notebook cells collected" in done.stdout.splitlines(), done.stdout + done.stderr
