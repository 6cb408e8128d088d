"""The command line: help, version, doctor, and errors as one sentence."""

import json
import os
import subprocess
import sys

import typer
from typer.testing import CliRunner

from labkit import __version__, doctor
from labkit.cli import _Commands, app
from labkit.errors import InputError

runner = CliRunner()


def test_version_and_module_entry_point_agree():
    assert runner.invoke(app, ["--version"]).output == f"labkit {__version__}\n"
    child = subprocess.run(
        [sys.executable, "-m", "labkit", "--version"], capture_output=True, text=True, check=True
    )
    assert child.stdout == f"labkit {__version__}\n"


def test_every_command_explains_itself_with_an_example():
    root = typer.main.get_command(app)
    assert "doctor" in root.commands
    for name in root.commands:
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0, name
        assert "Examples:" in result.output and f"labkit {name}" in result.output, name


def test_unknown_command_is_refused_by_name():
    result = runner.invoke(app, ["no-such-command"])
    assert result.exit_code == 2
    assert "no-such-command" in result.output


def _failing(error: BaseException) -> typer.Typer:
    broken = typer.Typer(cls=_Commands, pretty_exceptions_enable=False)

    @broken.callback()
    def root() -> None: ...

    @broken.command()
    def fail() -> None:
        raise error

    return broken


def test_lab_errors_become_one_sentence_and_exit_code_1():
    error = InputError("ids reach 600; the vocabulary ends at 511")
    result = runner.invoke(_failing(error), ["fail"])
    assert result.exit_code == 1
    assert result.stderr == "labkit: ids reach 600; the vocabulary ends at 511\n"
    assert "Traceback" not in result.output


def test_other_errors_are_not_hidden():
    result = runner.invoke(_failing(ZeroDivisionError()), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_interrupt_gives_130():
    result = runner.invoke(_failing(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == 130
    assert result.stderr == "labkit: stopped\n"


def test_doctor_reports_every_topic():
    result = runner.invoke(app, ["doctor", "--json"])
    findings = {finding["topic"]: finding for finding in json.loads(result.stdout)}
    assert set(findings) == {"labkit", "torch", "packages", "memory", "disk", "browser", "data"}
    assert findings["torch"]["state"] == "ok"
    assert findings["packages"]["state"] != "missing"
    assert result.exit_code == any(f["state"] == "missing" for f in findings.values())


def test_doctor_measures_the_mini_model(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    assert doctor._mini().state == "missing"
    (tmp_path / "mini").mkdir()
    (tmp_path / "mini" / "config.json").write_text("{}")
    (tmp_path / "mini" / "model.safetensors").write_bytes(bytes(2_499_998))
    finding = doctor._mini()
    assert finding.state == "ok"
    assert finding.text.endswith("2 files, 2.5 MB")


def test_doctor_names_a_missing_package(monkeypatch):
    requirements = ["torch>=2", "no-such-package-here>=1", "pytest ; extra == 'test'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    missing = [f for f in doctor._packages() if f.state == "missing"]
    assert len(missing) == 1 and "no-such-package-here" in missing[0].text


def test_doctor_lists_direct_dependencies_without_extras(monkeypatch):
    requirements = ["numpy>=2", "pytest ; extra == 't'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    (finding,) = doctor._packages()
    assert finding.state == "ok" and finding.text.startswith("numpy ")
    assert "pytest" not in finding.text


def test_doctor_says_when_labkit_is_not_installed(monkeypatch):
    def absent(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    (finding,) = doctor._packages()
    assert finding.state == "note" and "lab.py setup" in finding.text


def test_memory_limit_of_a_container(tmp_path):
    assert doctor.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("3221225472\n")
    assert doctor.memory_limit(tmp_path) == 3 * doctor.GIB


def test_browser_candidates_per_platform():
    def nowhere(name):
        return None

    assert doctor.browser_candidates("Linux", {}, nowhere) == []
    linux = doctor.browser_candidates("Linux", {}, {"chromium": "/usr/bin/chromium"}.get)
    assert linux == ["/usr/bin/chromium"]
    mac = doctor.browser_candidates("Darwin", {}, nowhere)
    assert "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" in mac
    windows = doctor.browser_candidates("Windows", {"PROGRAMFILES": r"C:\Programs"}, nowhere)
    assert windows[0] == r"C:\Programs\Google\Chrome\Application\chrome.exe"


def test_a_named_browser_is_the_only_one_considered(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_BROWSER", str(tmp_path / "absent"))
    assert doctor.find_browser() is None
    assert "is not a file" in doctor._browser().text
    (tmp_path / "here").write_text("")
    monkeypatch.setenv("LABKIT_BROWSER", str(tmp_path / "here"))
    assert doctor.find_browser() == os.fspath(tmp_path / "here")
