"""lab.py: the facts per platform, the resumable set-up, and what each word starts."""

import ast
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "lab.py").read_text(encoding="utf-8")


@pytest.fixture
def lab():
    spec = importlib.util.spec_from_file_location("lab_entry", ROOT / "lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- an old Python gets as far as the explanation -------------------------------------------


def test_parses_on_python_3_6():
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    for node in ast.walk(tree):
        # evaluated when the function is defined: `list[str]` without quotes fails before 3.9
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            assert isinstance(annotation, ast.Constant | ast.Name), ast.unparse(annotation)


def test_needs_the_standard_library_only():
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] in sys.stdlib_module_names
        assert not isinstance(node, ast.ImportFrom)


# ---- facts per platform ---------------------------------------------------------------------


def test_python_of_the_environment(lab):
    assert lab.venv_python("/a/.venv", "Linux") == "/a/.venv/bin/python"
    assert lab.venv_python("/a/.venv", "Darwin") == "/a/.venv/bin/python"
    assert lab.venv_python(r"C:\a\.venv", "Windows") == r"C:\a\.venv\Scripts\python.exe"


def test_site_packages(lab):
    assert lab.site_packages_patterns("/v", "Darwin") == ["/v/lib/python3.*/site-packages"]
    assert lab.site_packages_patterns(r"C:\v", "Windows") == [r"C:\v\Lib\site-packages"]


def test_refusal_names_the_version_found_and_the_versions_needed(lab):
    assert lab.refusal((3, 11), "Linux", "x86_64") == ""
    assert lab.refusal((3, 14), "Windows", "AMD64") == ""
    old = lab.refusal((3, 8), "Linux", "x86_64")
    assert old == "this is Python 3.8, and the lab needs 3.11 to 3.14"
    assert "3.15" in lab.refusal((3, 15), "Linux", "x86_64")
    assert lab.refusal((3, 12), "Darwin", "arm64") == ""
    assert "Intel" in lab.refusal((3, 12), "Darwin", "x86_64")


def test_other_pythons_are_looked_for_newest_first(lab):
    linux = lab.python_candidates("Linux")
    assert linux[0] == ["python3.14"] and linux[-1] == ["python3.11"]
    assert ["py", "-3.12"] in lab.python_candidates("Windows")


def test_without_a_fitting_python_the_sentence_says_what_to_install(lab, monkeypatch):
    monkeypatch.setattr(lab, "succeeds", lambda command: False)
    with pytest.raises(lab.Stop, match=r"Python 3\.8.*install Python 3\.14.*python3\.14 lab\.py"):
        lab.with_other_python("this is Python 3.8")


def test_with_a_fitting_python_it_is_used(lab, monkeypatch):
    calls = []
    monkeypatch.setattr(lab, "succeeds", lambda command: command[0] == "python3.12")
    monkeypatch.setattr(lab.platform, "system", lambda: "Linux")
    monkeypatch.setattr(lab.subprocess, "call", lambda command, env: calls.append(command) or 7)
    monkeypatch.setattr(lab.sys, "argv", ["lab.py", "test"])
    assert lab.with_other_python("this is Python 3.8") == 7
    assert calls == [["python3.12", str(ROOT / "lab.py"), "test"]]


@pytest.mark.parametrize(
    "choice, system, nvidia, expected",
    [
        ("", "Linux", False, True),
        ("", "Linux", True, False),
        ("", "Darwin", False, False),
        ("", "Windows", False, False),
        ("pypi", "Linux", False, False),
        ("cpu", "Linux", True, True),
    ],
)
def test_which_build_of_torch(lab, choice, system, nvidia, expected):
    assert lab.wants_cpu_index(choice, system, nvidia) is expected


def test_allocator_settings_on_linux_only_and_the_user_wins(lab):
    env = lab.child_environment({"MALLOC_ARENA_MAX": "4", "PYTHONHOME": "/x"}, "Linux")
    assert env["MALLOC_ARENA_MAX"] == "4" and env["MALLOC_MMAP_MAX_"] == "0"
    assert "PYTHONHOME" not in env
    assert not any(name.startswith("MALLOC") for name in lab.child_environment({}, "Darwin"))


def test_jupyter_opens_the_first_notebook_and_phones_nobody(lab):
    command = lab.jupyter_command("py", ["--no-browser"], is_root=False)
    assert command[:4] == ["py", "-m", "jupyterlab", "notebooks/00_start.ipynb"]
    assert command[-1] == "--no-browser" and "--allow-root" not in command
    assert "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate" in command
    assert "--allow-root" in lab.jupyter_command("py", [], is_root=True)


def test_pytest_runs_once_over_tests_and_notebooks(lab):
    folders = ["tests", "notebooks"]
    command = lab.pytest_command("py", [], folders)
    assert command[:3] == ["py", "-m", "pytest"] and command[-2:] == folders
    assert "--nbval-lax" in command and "--nbval-cell-timeout=60" in command
    assert command[command.index("-m", 2) + 1] == "not slow"
    everything = lab.pytest_command("py", ["--all"], folders)
    assert "not slow" not in everything and "--all" not in everything
    for path in ("tests/test_cli.py::test_x", r"tests\test_cli.py", "notebooks/00_start.ipynb"):
        assert lab.pytest_command("py", [path], folders)[-1] == path
    assert lab.pytest_command("py", ["-k", "floors"], folders)[-4:] == ["-k", "floors", *folders]


def test_advice_for_a_missing_venv_module(lab):
    assert "apt install python3.11-venv" in lab.venv_package_advice("Linux", (3, 11))
    assert "python.org" in lab.venv_package_advice("Darwin", (3, 11))


def test_a_python_without_ensurepip_is_explained(lab, monkeypatch):
    monkeypatch.setattr(lab.platform, "system", lambda: "Linux")
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: name != "ensurepip")
    with pytest.raises(lab.Stop, match="lacks its module ensurepip; on Debian"):
        lab.make_venv("/nowhere/python")


# ---- the stamp and the resumable set-up -----------------------------------------------------


@pytest.fixture
def workplace(lab, monkeypatch, tmp_path):
    """lab.py in a folder of its own; pip and venv are replaced by a list of what was asked for."""
    (tmp_path / "requirements.lock").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    venv = tmp_path / ".venv"
    asked = []
    monkeypatch.setattr(lab, "ROOT", str(tmp_path))
    monkeypatch.setattr(lab, "VENV", str(venv))
    monkeypatch.setattr(lab, "version_of", lambda python: "3.11" if venv.exists() else "")
    monkeypatch.setattr(lab, "succeeds", lambda command: venv.exists())
    monkeypatch.setattr(lab, "make_venv", lambda python: (asked.append("venv"), venv.mkdir()))
    monkeypatch.setattr(lab, "install", lambda python, level, env: asked.append(level))
    lab.asked = asked
    return lab


def test_set_up_does_each_thing_once(workplace):
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "run"]
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "run"]
    workplace.set_up("test", {})
    assert workplace.asked == ["venv", "run", "test"]
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "run", "test"]


def test_a_changed_lock_is_installed_with_the_tests_that_were_there(workplace):
    workplace.set_up("test", {})
    Path(workplace.ROOT, "requirements.lock").write_text("a==2\n")
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "test", "test"]


def test_an_interrupted_install_is_taken_up_again(workplace, monkeypatch):
    def interrupted(python, level, env):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workplace, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workplace.set_up("run", {})
    assert workplace.read_stamp(workplace.VENV) == {}
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "run"]  # the environment itself is kept


def test_an_interrupted_update_does_not_pass_for_finished(workplace, monkeypatch):
    workplace.set_up("run", {})

    def interrupted(python, level, env):
        raise KeyboardInterrupt

    Path(workplace.ROOT, "requirements.lock").write_text("a==2\n")
    with monkeypatch.context() as patch:
        patch.setattr(workplace, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workplace.set_up("run", {})
    Path(workplace.ROOT, "requirements.lock").write_text("a==1\n")  # what the old stamp named
    workplace.set_up("run", {})
    assert workplace.asked == ["venv", "run", "run"]


def test_the_stamp_depends_on_lock_folder_and_python(workplace, tmp_path):
    mark = workplace.fingerprint(str(tmp_path), "3.11")
    assert workplace.fingerprint(str(tmp_path), "3.12") != mark
    other = tmp_path / "moved"
    other.mkdir()
    for name in ("requirements.lock", "pyproject.toml"):
        (other / name).write_bytes((tmp_path / name).read_bytes())
    assert workplace.fingerprint(str(other), "3.11") != mark


@pytest.mark.parametrize("content", ["", "{", "[]", '{"level": "everything"}'])
def test_a_damaged_stamp_means_not_set_up(lab, tmp_path, content):
    (tmp_path / "lab.json").write_text(content)
    assert not lab.is_set_up(lab.read_stamp(str(tmp_path)), "mark", "run")


def test_what_an_interrupted_pip_leaves_is_found(lab, tmp_path):
    for name in ("whole-1.0.dist-info", "torn-1.0.dist-info", "~orch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "METADATA").write_text("")
    (tmp_path / "whole-1.0.dist-info" / "INSTALLER").write_text("pip")
    found = [os.path.basename(folder) for folder in lab.half_installed(str(tmp_path))]
    assert found == ["torn-1.0.dist-info", "~orch"]


def test_jupyter_asks_no_question_about_news(workplace):
    workplace.set_up("run", {})
    path = Path(workplace.VENV, "share", "jupyter", "lab", "settings", "overrides.json")
    settings = json.loads(path.read_text())["@jupyterlab/apputils-extension:notification"]
    assert settings == {"fetchNews": "false", "checkForUpdates": False}


# ---- the network ----------------------------------------------------------------------------


def test_whether_an_index_answers(lab):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert lab.answers(address, 5.0)
    thread.join()
    server.server_close()
    assert not lab.answers(address, 5.0)


def test_torch_comes_from_its_cpu_index_only_where_that_answers(lab, monkeypatch):
    for reachable in (True, False):
        calls = []
        monkeypatch.setattr(lab, "wants_cpu_index", lambda *facts: True)
        monkeypatch.setattr(lab, "answers", lambda url, seconds, r=reachable: r)
        monkeypatch.setattr(lab.subprocess, "call", lambda c, to=calls, **k: to.append(c) or 0)
        lab.install("py", "test", {})
        assert any(lab.TORCH_CPU_INDEX in call for call in calls) is reachable
        assert calls[-1][-4:] == ["-c", "requirements.lock", "-e", ".[test]"]


def test_a_failed_install_without_network_says_so(lab, monkeypatch):
    monkeypatch.setattr(lab, "wants_cpu_index", lambda *facts: False)
    monkeypatch.setattr(lab.subprocess, "call", lambda command, **options: 1)
    monkeypatch.setattr(lab, "answers", lambda url, seconds: False)
    with pytest.raises(lab.Stop, match="does not answer.*HTTPS_PROXY.*goes on from here"):
        lab.install("py", "run", {})
    monkeypatch.setattr(lab, "answers", lambda url, seconds: True)
    with pytest.raises(lab.Stop, match="see above"):
        lab.install("py", "run", {})


# ---- what each word starts ------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, level, command",
    [
        (["generate", "Once", "--seed", "1"], "run", "-m labkit generate Once --seed 1".split()),
        (["labkit", "--help"], "run", ["-m", "labkit", "--help"]),
        (["--version"], "run", ["-m", "labkit", "--version"]),
        ([], "run", ["-m", "jupyterlab", "notebooks/00_start.ipynb"]),
        (["--no-browser"], "run", ["-m", "jupyterlab", "notebooks/00_start.ipynb"]),
        (["test"], "test", ["-m", "pytest"]),
    ],
)
def test_words(lab, monkeypatch, words, level, command):
    monkeypatch.chdir(ROOT)  # main changes the folder; this puts it back afterwards
    levels, commands = [], []
    monkeypatch.setattr(lab, "set_up", lambda wanted, env: levels.append(wanted) or "py")
    monkeypatch.setattr(lab, "run", lambda started, env: commands.append(started) or 3)
    assert lab.main(words) == 3
    assert levels == [level]
    assert commands[0][0] == "py" and commands[0][1 : len(command) + 1] == command


def test_help_needs_no_set_up_and_setup_starts_nothing(lab, monkeypatch, capsys):
    levels = []
    monkeypatch.setattr(lab, "set_up", lambda wanted, env: levels.append(wanted))
    monkeypatch.setattr(lab, "run", None)
    assert lab.main(["--help"]) == 0 and levels == []
    assert "python3 lab.py test --all" in capsys.readouterr().out
    assert lab.main(["setup"]) == lab.main(["setup", "--test"]) == 0
    assert levels == ["run", "test"]


def test_an_exit_code_passes_through_unchanged(lab):
    code = "import lab, os; lab.run([os.sys.executable, '-c', 'raise SystemExit(42)'], os.environ)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 42


def test_torch_is_the_locked_one(lab):
    assert lab.TORCH in (ROOT / "requirements.lock").read_text().splitlines()
