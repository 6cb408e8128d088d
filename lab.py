#!/usr/bin/env python3
"""Sets the lab up in .venv and starts it: `python3 lab.py --help` says how.

Standard library only. The file must parse on Python 3.6, so that an old Python gets as far as
the sentence that names the version it needs: no walrus, no `match`, no bare `list[str]`.
Reading order: facts per platform (pure functions), the set-up, the commands.
"""

import glob
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
NOTEBOOK = "notebooks/00_start.ipynb"
OLDEST, NEWEST = (3, 11), (3, 14)  # what the locked torch is published for
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEVELS = ("run", "test")  # what is installed: the lab, or the lab and its tests

HELP = """\
usage: python3 lab.py [COMMAND] [OPTIONS]

  python3 lab.py                     set up what is missing, open the lab in the browser
  python3 lab.py --no-browser        the same; options go to JupyterLab, which prints its address
  python3 lab.py test                set up, then run the tests, notebooks included
  python3 lab.py test --all          the long tests too
  python3 lab.py test -k floors      further words go to pytest
  python3 lab.py setup [--test]      set up (for the tests too) and stop
  python3 lab.py doctor              what this machine offers: versions, memory, browser, disk
  python3 lab.py COMMAND --help      every other word is a command of labkit; --help lists them:
  python3 lab.py labkit --help

The set-up goes into .venv beside this file and nowhere else; interrupt it whenever you like, the
next call goes on from there. Delete .venv to start over.

environment variables:
  LAB_TORCH=cpu|pypi    which build of PyTorch to install (default: the smaller CPU build on Linux
                        without an NVIDIA GPU, PyPI's build everywhere else)
  MALLOC_*              kept if you set them; on Linux the lab sets glibc's allocator up for large
                        tensors
"""


# ---- facts per platform ---------------------------------------------------------------------


def venv_python(venv: str, system: str) -> str:
    """The interpreter inside a virtual environment; `system` as platform.system() names it."""
    return venv + (r"\Scripts\python.exe" if system == "Windows" else "/bin/python")


def site_packages_patterns(venv: str, system: str) -> "list[str]":
    """Where packages lie inside a virtual environment, as glob patterns."""
    if system == "Windows":
        return [venv + r"\Lib\site-packages"]
    return [venv + "/lib/python3.*/site-packages"]


def python_candidates(system: str) -> "list[list[str]]":
    """Commands that may start a Python which suits the lab, best first."""
    versions = ["3.%d" % minor for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    if system == "Windows":
        return [["py", "-" + version] for version in versions]
    return [["python" + version] for version in versions]


def venv_package_advice(system: str, version: "tuple[int, int]") -> str:
    """What to install where Python came without venv or ensurepip."""
    if system == "Linux":
        return "on Debian or Ubuntu: sudo apt install python%d.%d-venv" % version
    return "install Python from https://www.python.org/downloads/, which brings it"


def refusal(version: "tuple[int, int]", system: str, machine: str) -> str:
    """Why the lab cannot be installed with this Python, in one sentence; '' where it can."""
    if not OLDEST <= version <= NEWEST:
        return "this is Python %d.%d, and the lab needs %d.%d to %d.%d" % (
            version + OLDEST + NEWEST
        )
    if system == "Darwin" and machine == "x86_64":
        return (
            "this Python is built for Intel Macs, for which PyTorch publishes nothing any more"
            " (on an Apple silicon Mac, install an arm64 Python)"
        )
    return ""


def wants_cpu_index(choice: str, system: str, nvidia: bool) -> bool:
    """Whether to look for torch's CPU build: elsewhere PyPI's build is the right one anyway."""
    if choice in ("cpu", "pypi"):
        return choice == "cpu"
    return system == "Linux" and not nvidia


def child_environment(environ: "dict[str, str]", system: str) -> "dict[str, str]":
    """The environment of everything that the lab starts; what the user has set stays."""
    env = dict(environ)
    env.pop("PYTHONHOME", None)  # would take the virtual environment's standard library away
    env["PIP_USER"] = "0"  # a pip set to install for the user refuses to in a virtual environment
    if system == "Linux":
        # Big temporaries come from the heap and stay there: mapping them afresh costs a page
        # fault for every 4 KiB.
        env.setdefault("MALLOC_MMAP_MAX_", "0")
        env.setdefault("MALLOC_TRIM_THRESHOLD_", "30000000000")
        env.setdefault("MALLOC_ARENA_MAX", "1")
    return env


def pip_install(python: str, *what: str) -> "list[str]":
    """A pip command line that asks no questions."""
    return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"] + [*what]


def project_requirement(level: str) -> str:
    """What pip is asked for, from the project folder: the project itself, editable."""
    return ".[test]" if level == "test" else "."


def jupyter_command(python: str, options: "list[str]", is_root: bool) -> "list[str]":
    """JupyterLab on the first notebook; it asks nobody for updates, news or extensions."""
    command = [python, "-m", "jupyterlab", NOTEBOOK]
    command.append("--ServerApp.root_dir=" + ROOT)  # else the notebook's folder, without labkit
    command.append("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate")
    command.append("--LabApp.news_url=None")
    command.append("--LabApp.extension_manager=readonly")
    if is_root:  # a container, usually; JupyterLab refuses otherwise
        command.append("--allow-root")
    return command + options


def pytest_command(python: str, words: "list[str]", folders: "list[str]") -> "list[str]":
    """One pytest run over tests and notebooks; `--all` adds the slow ones, paths narrow it."""
    command = [python, "-m", "pytest", "-ra", "--nbval-lax", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=60"] + ([] if "--all" in words else ["-m", "not slow"])
    rest = [word for word in words if word != "--all"]
    heads = [word.replace("\\", "/").split("::")[0].split("/")[0] for word in rest]
    narrowed = "tests" in heads or "notebooks" in heads
    return command + rest + ([] if narrowed else folders)


# ---- the stamp: written last, so that it stands for a finished set-up -----------------------


def fingerprint(root: str, python_version: str) -> str:
    """Changes when the set-up has to be done again: lock, project file, folder, Python."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml"):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read())
    digest.update(root.encode("utf-8"))  # an editable install holds the folder's name
    digest.update(python_version.encode("utf-8"))
    return digest.hexdigest()


def read_stamp(venv: str) -> "dict[str, str]":
    """The stamp of the last finished set-up; {} where there is none, or it is not readable."""
    try:
        with open(os.path.join(venv, "lab.json"), encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: str, mark: str, level: str) -> None:
    """Written beside its place and moved there: it is whole or it is not there."""
    path = os.path.join(venv, "lab.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"fingerprint": mark, "level": level}, file)
    os.replace(path + ".new", path)


def is_set_up(stamp: "dict[str, str]", mark: str, level: str) -> bool:
    """Whether a stamp covers the wanted level."""
    if stamp.get("fingerprint") != mark or stamp.get("level") not in LEVELS:
        return False
    return LEVELS.index(stamp["level"]) >= LEVELS.index(level)


def half_installed(site_packages: str) -> "list[str]":
    """Folders that an interrupted pip has left: it would take such a package for installed.

    pip writes INSTALLER after all of a package's files, and renames a package that it is
    removing to a name that begins with a tilde.
    """
    left = glob.glob(os.path.join(site_packages, "~*"))
    for folder in glob.glob(os.path.join(site_packages, "*.dist-info")):
        if not os.path.exists(os.path.join(folder, "INSTALLER")):
            left.append(folder)
    return sorted(left)


# ---- the set-up -----------------------------------------------------------------------------


class Stop(Exception):
    """The set-up cannot go on; the message says why and what to do."""


def say(text: str) -> None:
    """On standard error, as pip's words: standard output belongs to the command that runs."""
    print("lab: " + text, file=sys.stderr, flush=True)


def pip(command: "list[str]", env: "dict[str, str]") -> int:
    return subprocess.call(command, cwd=ROOT, env=env, stdout=sys.stderr)


def answers(url: str, seconds: float) -> bool:
    """Whether a URL answers in time. In a thread: no time limit of Python's covers a look-up."""
    seen = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds)
            seen.append(True)
        except (OSError, ValueError, socket.timeout):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(seen)


def has_nvidia() -> bool:
    return bool(shutil.which("nvidia-smi")) or os.path.exists("/proc/driver/nvidia/version")


def succeeds(command: "list[str]") -> bool:
    """Runs a command silently; False also where there is nothing to run."""
    null = subprocess.DEVNULL
    try:
        return subprocess.call(command, stdin=null, stdout=null, stderr=null) == 0
    except OSError:
        return False


def version_of(python: str) -> str:
    """'3.11' for a working interpreter, '' for one that is missing or broken."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        output = subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL)
        return output.decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def make_venv(python: str) -> None:
    missing = [name for name in ("venv", "ensurepip") if not importlib.util.find_spec(name)]
    if missing:
        advice = venv_package_advice(platform.system(), sys.version_info[:2])
        raise Stop("this Python lacks its module %s; %s" % (" and ".join(missing), advice))
    say("making the environment .venv")
    inside = os.path.abspath(sys.prefix) == os.path.abspath(VENV)
    base = getattr(sys, "_base_executable", sys.executable) if inside else sys.executable
    command = [base, "-m", "venv", "--clear", VENV]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode != 0 or not version_of(python):
        sys.stdout.write(made.stdout.decode(errors="replace"))
        raise Stop("making .venv failed (see above); delete the folder .venv and try again")


def why_pip_failed() -> str:
    """pip has said what went wrong; this adds the commonest cause if it is the case."""
    if answers("https://pypi.org/simple/pip/", 6.0):
        return "installing failed (see above); the same command again goes on from here"
    return (
        "installing failed, and https://pypi.org does not answer: check the network, set"
        " HTTPS_PROXY where a proxy is needed; the same command again goes on from here"
    )


def install(python: str, level: str, env: "dict[str, str]") -> None:
    choice = os.environ.get("LAB_TORCH", "")
    if wants_cpu_index(choice, platform.system(), has_nvidia()):
        if answers(TORCH_CPU_INDEX + "/torch/", 4.0):
            say("installing PyTorch's CPU build from " + TORCH_CPU_INDEX)
            what = ["--no-deps", "--index-url", TORCH_CPU_INDEX, TORCH]
            if pip(pip_install(python, *what), env) != 0:
                say("that did not work; taking PyTorch from the package index instead")
        elif choice == "cpu":
            say("PyTorch's own index does not answer; taking PyTorch from the package index")
    say("installing the locked packages" + (" and the test tools" if level == "test" else ""))
    what = ["-c", "requirements.lock", "-e", project_requirement(level)]
    if pip(pip_install(python, *what), env) != 0:
        raise Stop(why_pip_failed())


def quieten_jupyter() -> None:
    """No question about news on the first start; lies in .venv, so a user's settings win."""
    folder = os.path.join(VENV, "share", "jupyter", "lab", "settings")
    os.makedirs(folder, exist_ok=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    with open(os.path.join(folder, "overrides.json"), "w", encoding="utf-8") as file:
        json.dump({"@jupyterlab/apputils-extension:notification": quiet}, file)


def set_up(level: str, env: "dict[str, str]") -> str:
    """Makes .venv what the lock says, doing nothing where it is; returns its Python."""
    system = platform.system()
    python = venv_python(VENV, system)
    version = version_of(python)
    stamp = read_stamp(VENV)
    if version and is_set_up(stamp, fingerprint(ROOT, version), level):
        return python
    started = time.time()
    if not version or not succeeds([python, "-m", "pip", "--version"]):
        make_venv(python)
    elif not stamp:
        say("going on with an unfinished set-up")
    for pattern in site_packages_patterns(VENV, system):
        for site in glob.glob(pattern):
            for folder in half_installed(site):
                say("removing what an interruption left: " + os.path.basename(folder))
                shutil.rmtree(folder, ignore_errors=True)
    # While packages change there is no stamp: an interruption here is seen by the next call.
    if stamp:
        os.remove(os.path.join(VENV, "lab.json"))
        if stamp.get("level") == "test":
            level = "test"
    install(python, level, env)
    quieten_jupyter()
    write_stamp(VENV, fingerprint(ROOT, version_of(python)), level)
    say("ready after %d s" % (time.time() - started))
    return python


# ---- the commands ---------------------------------------------------------------------------


def run(command: "list[str]", env: "dict[str, str]") -> int:
    """Runs a command in this process's place, so that signals and the exit code are its own."""
    sys.stdout.flush()
    if platform.system() != "Windows":
        os.execve(command[0], command, env)
    child = subprocess.Popen(command, env=env)  # Windows knows no exec
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the child got it too, and decides
            continue


def with_other_python(reason: str) -> int:
    """Goes on with a Python that suits, if there is one; else says what is needed."""
    if not os.environ.get("LAB_RESTARTED"):
        env = dict(os.environ, LAB_RESTARTED="1")
        for candidate in python_candidates(platform.system()):
            if succeeds(candidate + ["-c", "import ensurepip, venv"]):
                say("%s; going on with %s" % (reason, " ".join(candidate)))
                again = candidate + [os.path.abspath(__file__)] + sys.argv[1:]
                return subprocess.call(again, env=env)
    newest = "%d.%d" % NEWEST
    raise Stop(
        "%s; install Python %s from https://www.python.org/downloads/ or with your system's"
        " packages, then run python%s lab.py" % (reason, newest, newest)
    )


def main(words: "list[str]") -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    reason = refusal(tuple(sys.version_info[:2]), platform.system(), platform.machine())
    if reason:
        return with_other_python(reason)
    env = child_environment(dict(os.environ), platform.system())
    first = words[0] if words else ""
    if first == "setup":
        set_up("test" if "--test" in words else "run", env)
        return 0
    if first == "test":
        python = set_up("test", env)
        os.chdir(ROOT)
        folders = [name for name in ("tests", "notebooks") if os.path.isdir(name)]
        return run(pytest_command(python, words[1:], folders), env)
    python = set_up("run", env)
    if first and (first == "--version" or not first.startswith("-")):
        return run([python, "-m", "labkit"] + words[first == "labkit" :], env)
    os.chdir(ROOT)
    say("starting JupyterLab; Ctrl-C here stops it")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return run(jupyter_command(python, words, is_root), env)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stop as stop:
        sys.exit("lab: %s." % stop)
    except KeyboardInterrupt:
        say("interrupted; the same command again goes on from here")
        sys.exit(130)
