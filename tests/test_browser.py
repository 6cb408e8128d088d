"""The first notebook in JupyterLab, driven by Chromium: cells run, figures fill, controls work.

Screenshots go to artifacts/ (not tracked), in the light and the dark theme.
"""

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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARTIFACTS = ROOT / "artifacts"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SETTINGS = {  # every cell stays in the page, and no question is asked
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false",
                                                    "checkForUpdates": False},
}
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
FIGURES = """() => [...document.querySelectorAll('.js-plotly-plot')].map(plot => ({
    traces: plot.data.length,
    points: plot.data.map(trace => trace.y ? trace.y.length : 0),
    drawn: plot.querySelectorAll('.main-svg path, .main-svg text').length,
}))"""
VALUES = """(name) => {
    for (const plot of document.querySelectorAll('.js-plotly-plot')) {
        for (const trace of plot.data) {
            if (trace.name && trace.name.startsWith(name)) return Array.from(trace.y || []);
        }
    }
    return null;
}"""

ANSWERED = """() => document.querySelector('.jp-Dialog') !== null
    || document.querySelectorAll('.jp-CodeCell .jp-OutputArea-output').length > 0"""
RAN = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
    return /\\[\\d+\\]/.test(prompts[prompts.length - 1].textContent)
        || document.querySelector("[data-mime-type='application/vnd.jupyter.error']") !== null;
}"""


@contextlib.contextmanager
def jupyter(folder, theme):
    """JupyterLab over a copy of the notebooks; yields its address with the token."""
    work, home = folder / "work", folder / "home"
    shutil.copytree(ROOT / "notebooks", work)
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
            yield f"{address}/lab/tree/00_start.ipynb?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(address, server, log, seconds=90):
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


@pytest.fixture
def browser(chromium_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=FLAGS)
        yield chromium
        chromium.close()


def run_all_cells(page):
    """Run > Run All Cells, then wait until the last code cell has its number or one has failed."""
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=90_000)
    page.locator("#jp-main-statusbar :text('| Idle')").first.wait_for(timeout=90_000)
    try:
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
    except Exception:
        page.screenshot(path=ARTIFACTS / "stuck.png")
        raise


def errors(page):
    texts = page.locator(".jp-OutputArea-output[data-mime-type*='stderr'], "
                         ".jp-RenderedText[data-mime-type='application/vnd.jupyter.error'], "
                         ".jp-OutputArea-output:has-text('Error displaying widget')")
    return [texts.nth(i).inner_text()[:500] for i in range(texts.count())]


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_the_first_notebook_lives(browser, tmp_path, theme):
    ARTIFACTS.mkdir(exist_ok=True)
    with jupyter(tmp_path, theme) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address, timeout=90_000)
        run_all_cells(page)
        assert errors(page) == []

        # Two live figures (writing, attention), both drawn, both with data.
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length >= 2",
                               timeout=60_000)
        figures = page.evaluate(FIGURES)
        assert len(figures) == 2
        for figure in figures:
            assert figure["traces"] >= 2 and max(figure["points"]) >= 8 and figure["drawn"] > 20
        # The data-flow figures are pictures in the page, with a text for those who cannot see.
        flows = page.locator("svg[role=img][aria-label^='Data flow']")
        assert flows.count() == 2
        assert "40 layers" in flows.nth(1).get_attribute("aria-label")

        shoot(page, theme)
        move_the_query_by_keyboard(page)
        choose_another_layer(page)
        press_next_token(page)
        assert errors(page) == []
        assert problems == []
        page.close()


def move_the_query_by_keyboard(page):
    """The slider takes the focus and the arrow keys; figure and caption follow."""
    before = page.evaluate(VALUES, "window tokens")
    caption = page.locator("p[role=status]").last
    told = caption.inner_text()
    handle = page.locator(".widget-slider:has-text('query') [role=slider]").first
    if handle.count() == 0:
        handle = page.locator(".widget-slider:has-text('query') .noUi-handle").first
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        f"(before) => JSON.stringify(({VALUES})('window tokens')) !== JSON.stringify(before)",
        arg=before, timeout=20_000)
    assert page.evaluate(VALUES, "window tokens") != before
    assert len(before) > 0
    page.wait_for_function("([p, told]) => p.innerText !== told",
                           arg=[caption.element_handle(), told], timeout=20_000)
    assert "query 287" in caption.inner_text()


def choose_another_layer(page):
    """In the window-only layer nothing hangs below the text."""
    assert len(page.evaluate(VALUES, "selected compressed entries")) > 0
    box = page.locator(".widget-dropdown:has(label:has-text('layer')) select").first
    box.select_option(index=0)
    page.wait_for_function(f"() => ({VALUES})('selected compressed entries').length === 0",
                           timeout=20_000)


def press_next_token(page):
    before = page.evaluate(VALUES.replace("trace.y", "trace.x"), "the model's probability")
    page.locator("button:has-text('next token')").first.click()
    page.wait_for_function(
        f"(before) => JSON.stringify(({VALUES.replace('trace.y', 'trace.x')})"
        "(\"the model's probability\")) !== JSON.stringify(before)", arg=before, timeout=20_000)
    assert abs(sum(before) - 0.5) <= 0.5


def shoot(page, theme):
    """Screenshots of what a learner sees, one a figure."""
    page.set_viewport_size({"width": 1440, "height": 1800})
    shots = {"dataflow": "svg[aria-label^='Data flow'] >> nth=0",
             "writing": ".labkit:has(.js-plotly-plot) >> nth=0",
             "attention": ".labkit:has(.js-plotly-plot) >> nth=1"}
    for name, where in shots.items():
        part = page.locator(where)
        part.scroll_into_view_if_needed()
        part.screenshot(path=ARTIFACTS / f"00_start_{theme}_{name}.png")
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.locator(".widget-dropdown:has(label:has-text('layer'))").scroll_into_view_if_needed()
    page.mouse.move(700, 500)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(500)
    page.screenshot(path=ARTIFACTS / f"00_start_{theme}.png")
