"""What the repository may hold: sizes, no trace of a machine, a lock that resolves everywhere."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

import labkit

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
NOT_OURS = {".git", ".venv", "__pycache__", "runs", "artifacts", "build", "dist"}


def tracked_files() -> list[Path]:
    """What git tracks; in a copy without .git, every file outside the ignored folders."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not NOT_OURS & set(p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


FILES = tracked_files()


def text_of(path: Path) -> str | None:
    """A file's text; None for binary files (a NUL byte, or not UTF-8)."""
    data = path.read_bytes()
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def test_sizes():
    sizes = {path: path.stat().st_size for path in FILES}
    assert len(sizes) > 20
    assert [p for p, size in sizes.items() if size > 16_000_000] == []
    assert sum(sizes.values()) <= 60 * MB


# ---- no trace of a machine ------------------------------------------------------------------

# A home folder, or another folder that only one machine has.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:work|root|home|Users|mnt|opt|srv)/\w")
# A package index other than the public ones.
INDEX = re.compile(r"https?://([^\s/\"']+)/(?:\S*/)?simple(?:/|\b)")
PUBLIC_INDEXES = {"pypi.org"}
OUTSIDE = "../" + "shared"


def traces(text: str) -> list[str]:
    """Everything in a text that ties it to one machine."""
    found = [match.group() for match in MACHINE_PATH.finditer(text)]
    found += [host for host in INDEX.findall(text) if host not in PUBLIC_INDEXES]
    return found + [OUTSIDE] * (OUTSIDE in text)


def test_no_file_names_a_machine():
    told = {str(path): found for path in FILES if (found := traces(text_of(path) or ""))}
    assert told == {}


def test_the_check_for_machine_names_sees_them():
    for bad in (
        "/".join(["", "home", "ada", "lab"]),
        '"' + "/".join(["", "root", ".cache"]).replace(".", "") + '"',
        "https://mirror.example.org/" + "simple/torch",
        "see " + OUTSIDE + "/notes.md",
    ):
        assert traces(bad), bad
    for good in ("https://pypi.org/simple/pip/", "/usr/bin/chromium", "https://a.org/home/x"):
        assert traces(good) == [], good


# ---- the lock -------------------------------------------------------------------------------

LOCK = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PLATFORMS = [
    {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"},
    {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"},
    {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"},
]
MACHINES = {"linux": "x86_64", "darwin": "arm64", "win32": "AMD64"}


def pins(platform: dict[str, str], python: str) -> dict[str, str]:
    """Name -> version of what the lock holds for one platform and Python ('3.12')."""
    environment = default_environment() | platform
    environment["platform_machine"] = MACHINES[platform["sys_platform"]]
    environment |= {"python_version": python, "python_full_version": python + ".9", "extra": ""}
    found: dict[str, str] = {}
    for line in LOCK:
        if line.marker is None or line.marker.evaluate(environment):
            assert line.name not in found, f"{line.name} is pinned twice for {environment}"
            found[line.name] = str(line.specifier).removeprefix("==")
    return found


def test_the_lock_is_exact_and_public():
    for line in LOCK:
        (clause,) = line.specifier
        assert clause.operator == "==" and "*" not in clause.version, line
        assert "+" not in clause.version, f"{line}: a local version exists on one index only"
        assert line.url is None, line
        assert not line.name.startswith(("nvidia-", "cuda-", "triton")), line


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform["platform_system"])
def test_the_lock_covers_every_direct_dependency(platform, python):
    locked = pins(platform, python)
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    for dependency in map(Requirement, wanted):
        assert dependency.name in locked, dependency.name
        assert dependency.specifier.contains(locked[dependency.name]), dependency


def test_the_lock_differs_per_platform_where_it_must():
    linux, mac, windows = (pins(platform, "3.12") for platform in PLATFORMS)
    assert "pywinpty" in windows and "pywinpty" not in linux
    assert "appnope" in mac and "appnope" not in linux
    assert "pexpect" in linux and "pexpect" not in windows


def test_dependencies_have_lower_bounds_only():
    for dependency in map(Requirement, PROJECT["dependencies"]):
        assert [clause.operator for clause in dependency.specifier] == [">="], dependency


# ---- documents and commands -----------------------------------------------------------------


def test_version_is_the_same_everywhere():
    assert PROJECT["version"] == labkit.__version__
    assert f"\nversion: {labkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_readme_and_ci_name_the_test_command():
    assert "python3 lab.py test" in (ROOT / "README.md").read_text()
    ci = ROOT / ".ci" / "run"
    assert "python3 lab.py test --all" in ci.read_text()
    assert os.name == "nt" or os.access(ci, os.X_OK)


def test_licences_are_there():
    assert "MIT License" in (ROOT / "LICENSE").read_text()
    assert "Attribution 4.0 International" in (ROOT / "LICENSE-text.md").read_text()


def test_conda_installs_the_package_with_its_extras_and_anywidget():
    words = (ROOT / "environment.yml").read_text().split()
    assert "anywidget" in words and ".[test]" in words


LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def test_links_between_documents_lead_somewhere():
    documents = [path for path in FILES if path.suffix == ".md"]
    links = [(p, target) for p in documents for target in LINK.findall(p.read_text())]
    local = [(p, target) for p, target in links if "://" not in target and "mailto:" not in target]
    assert local
    assert [(p.name, t) for p, t in local if not (p.parent / t).exists()] == []


# ---- notebooks ------------------------------------------------------------------------------


def faults(notebook: dict, size: int) -> list[str]:
    """What a notebook may not hold."""
    told = ["holds widget state"] if "widgets" in notebook.get("metadata", {}) else []
    told += ["300 KiB or more"] if size >= 300 * 1024 else []
    kernel = notebook.get("metadata", {}).get("kernelspec", {}).get("name")
    told += [] if kernel == "python3" else [f"kernel {kernel}, not python3"]
    ids = [cell.get("id") for cell in notebook["cells"]]
    told += [] if all(ids) and len(set(ids)) == len(ids) else ["cells without ids of their own"]
    return told


def test_notebooks_are_light_and_the_first_one_is_there():
    notebooks = [path for path in FILES if path.suffix == ".ipynb"]
    assert ROOT / "notebooks" / "00_start.ipynb" in notebooks  # lab.py opens it
    told = {
        path.name: found
        for path in notebooks
        if (found := faults(json.loads(path.read_text()), path.stat().st_size))
    }
    assert told == {}


def test_the_check_of_notebooks_sees_faults():
    good = {"cells": [{"id": "a"}], "metadata": {"kernelspec": {"name": "python3"}}}
    assert faults(good, 10) == []
    assert faults(good, 300 * 1024) == ["300 KiB or more"]
    twice = good | {"cells": [{"id": "a"}, {"id": "a"}]}
    assert faults(twice, 1) == ["cells without ids of their own"]
    bad = {"cells": [], "metadata": {"widgets": {}, "kernelspec": {"name": "venv"}}}
    assert faults(bad, 1) == ["holds widget state", "kernel venv, not python3"]
