"""What this machine offers the lab: the findings behind `labkit doctor`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from labkit import __version__
from labkit.errors import LabError
from labkit.paths import data_dir

GIB = 1 << 30

# What a learner's notebook may take, and what a fresh set-up and a training run leave on disk.
MEMORY_WANTED = 2 * GIB
DISK_WANTED = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """One line of the report: `missing` stops the lab, `note` costs some part of it."""

    topic: str
    state: Literal["ok", "note", "missing"]
    text: str


def examine() -> list[Finding]:
    """Looks at everything; takes the second or two that importing torch takes."""
    findings = [_python(), _torch(), *_packages()]
    findings += [_memory(), _disk(), _browser(), _mini()]
    return findings


def as_text(findings: list[Finding]) -> str:
    """One line a finding: state, topic, text."""
    width = max(len(finding.topic) for finding in findings)
    return "\n".join(f"{f.state:<8} {f.topic:<{width}}  {f.text}" for f in findings)


def as_json(findings: list[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def _python() -> Finding:
    text = f"labkit {__version__}, Python {platform.python_version()}, {platform.platform()}"
    return Finding("labkit", "ok", text)


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Finding("torch", "missing", f"does not import ({error}); run python3 lab.py setup")
    devices = ["cpu"]
    devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    threads = f"{torch.get_num_threads()} threads on {usable_cores()} usable cores"
    malloc = "set" if "MALLOC_MMAP_MAX_" in os.environ else "not set"
    text = f"{torch.__version__}; {', '.join(devices)}; {threads}"
    if sys.platform == "linux":
        text += f"; MALLOC_* {malloc}"
    return Finding("torch", "ok", text)


def _packages() -> list[Finding]:
    """The project's other direct dependencies, read from its own metadata."""
    found: list[str] = []
    absent: list[str] = []
    try:
        requirements = metadata.requires("labkit") or []
    except metadata.PackageNotFoundError:
        text = "labkit runs from its folder without being installed; run python3 lab.py setup"
        return [Finding("packages", "note", text)]
    for line in requirements:
        if "extra ==" in line:
            continue
        name = _requirement_name(line)
        if name == "torch":
            continue
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            absent.append(name)
    findings = [Finding("packages", "ok", ", ".join(found))]
    if absent:
        text = f"not installed: {', '.join(absent)}; run python3 lab.py setup"
        findings.append(Finding("packages", "missing", text))
    return findings


def _requirement_name(line: str) -> str:
    """'torch>=2.9; python_version ...' -> 'torch'."""
    end = next((i for i, c in enumerate(line) if not (c.isalnum() or c in "-_.")), len(line))
    return line[:end]


def usable_cores() -> int:
    """The cores this process may run on: a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory a container may use in bytes (cgroup v2, then v1); None without such a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            words = (cgroup / name).read_text().strip()
        except OSError:
            continue
        # v1 writes "no limit" as a number near 2^63, v2 as the word max.
        if words.isdigit() and int(words) < 1 << 60:
            return int(words)
    return None


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit()
    total = min(memory.total, limit) if limit else memory.total
    available = min(memory.available, total)
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < MEMORY_WANTED:
        return Finding("memory", "note", text + "; below 2 GiB: close other programs first")
    return Finding("memory", "ok", text)


def _disk() -> Finding:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free < DISK_WANTED:
        return Finding("disk", "note", text + "; below 2 GiB: training runs may not fit")
    return Finding("disk", "ok", text)


def browser_candidates(
    system: str, environ: Mapping[str, str], which: Callable[[str], str | None]
) -> list[str]:
    """Where Chromium or a relative of it may lie; `system` as platform.system() names it."""
    override = environ.get("LABKIT_BROWSER")
    if override:
        return [override]  # wrong or right: no other browser is used behind the user's back
    names = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"]
    found = [path for path in (which(name) for name in names) if path]
    if system == "Darwin":
        apps = ["Chromium", "Google Chrome", "Microsoft Edge"]
        found += [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in apps]
    if system == "Windows":
        for variable in ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA"):
            if folder := environ.get(variable):
                found.append(folder + r"\Google\Chrome\Application\chrome.exe")
                found.append(folder + r"\Microsoft\Edge\Application\msedge.exe")
    return found


def find_browser() -> str | None:
    """The path of a browser that Playwright can drive; None where there is none."""
    candidates = browser_candidates(platform.system(), os.environ, shutil.which)
    return next((path for path in candidates if os.path.isfile(path)), None)


def _browser() -> Finding:
    path = find_browser()
    if path:
        return Finding("browser", "ok", path)
    override = os.environ.get("LABKIT_BROWSER")
    why = f"LABKIT_BROWSER names {override}, which is not a file" if override else (
        "no Chromium, Chrome or Edge found; LABKIT_BROWSER may name one"
    )
    return Finding("browser", "note", f"{why}: the browser tests are skipped")


def _mini() -> Finding:
    """Whether the trained mini model is there, and what it weighs."""
    try:
        folder = data_dir() / "mini"
    except LabError as error:
        return Finding("data", "missing", str(error))
    files = [path for path in sorted(folder.glob("**/*")) if path.is_file()]
    if not any(path.name == "config.json" for path in files):
        text = f"{folder} holds no config.json: restore it from the repository"
        return Finding("data", "missing", text)
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    return Finding("data", "ok", f"{folder}: {len(files)} files, {megabytes:.1f} MB")
