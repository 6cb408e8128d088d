"""A notebook in JupyterLab in a browser: for the browser tests and for the README's picture."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SETTINGS = {  # every cell stays in the page, and no question is asked
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false",
                                                    "checkForUpdates": False},
}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
ANSWERED = """() => document.querySelector('.jp-Dialog') !== null
    || document.querySelectorAll('.jp-CodeCell .jp-OutputArea-output').length > 0"""
# A traceback has the type of standard error. The cells behind a failed one are never numbered,
# so the run is over as well when there is one and nothing is waiting: "*" marks a waiting cell.
# An exercise that is not started fails too, but the run goes on behind it.
RAN = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
        .map(prompt => prompt.textContent);
    const told = [...document.querySelectorAll("[data-mime-type='application/vnd.jupyter.stderr']")]
        .filter(output => !output.textContent.includes('not started'));
    return /\\[\\d+\\]/.test(prompts[prompts.length - 1])
        || told.length > 0 && !prompts.some(prompt => prompt.includes('*'));
}"""


@contextlib.contextmanager
def jupyter(folder: Path, theme: str, notebook: str = "00_start.ipynb",
            notebooks: Path = ROOT / "notebooks") -> Iterator[str]:
    """JupyterLab over a copy of `notebooks`, all its state in `folder`; yields the address of
    `notebook` with the token. theme: a key of THEMES."""
    work, home = folder / "work", folder / "home"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(notebooks, work)
    for name, values in {**SETTINGS, "@jupyterlab/apputils-extension/themes":
                         {"theme": THEMES[theme]}}.items():
        file = home / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(8)
    env = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
           "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_RUNTIME_DIR": str(home / "run"),
           "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
           "IPYTHONDIR": str(home / "ipython"),
           "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1",
               f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
               f"--ServerApp.root_dir={work}", "--LabApp.news_url=None",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
               "--LabApp.extension_manager=readonly"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    with open(folder / "jupyter.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=work)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api/status?token={token}", server, folder / "jupyter.log")
            yield f"{address}/lab/tree/{notebook}?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path,
              seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise AssertionError(f"JupyterLab ended at once:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    told = log.read_text()[-2000:]
    raise AssertionError(f"JupyterLab did not answer within {seconds} s:\n{told}")


def run_all_cells(page: Any) -> None:
    """Run > Run All Cells, then wait until the last code cell has its number or one has failed."""
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=90_000)
    page.locator("#jp-main-statusbar :text('| Idle')").first.wait_for(timeout=90_000)
    for _ in range(3):
        page.locator("li.lm-MenuBar-item:has-text('Run')").click()
        page.locator("li.lm-Menu-item[data-command='runmenu:run-all']").click()
        page.wait_for_function(ANSWERED, timeout=60_000)
        # Asked before the page has joined the kernel, JupyterLab asks back which one.
        select = page.locator(".jp-Dialog:has-text('Select Kernel') button.jp-mod-accept")
        if not select.is_visible():
            break
        select.click()
        page.wait_for_timeout(3_000)
    page.wait_for_function(RAN, timeout=120_000)


def errors(page: Any) -> list[str]:
    """What cells complained about: tracebacks, standard error, widgets that were not drawn."""
    texts = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr'], "
                         ".jp-OutputArea-output:has-text('Error displaying widget')")
    return [texts.nth(i).inner_text()[:500] for i in range(texts.count())]


def show_explorer(page: Any) -> None:
    """The attention explorer fills the window."""
    page.set_viewport_size({"width": 1440, "height": 1110})
    control = page.locator(".widget-dropdown:has(label:has-text('layer'))")
    control.evaluate("control => control.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(500)
