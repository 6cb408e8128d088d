"""The first notebook in JupyterLab, driven by Chromium: cells run, figures fill, controls work.

Screenshots go to artifacts/ (not tracked), in the light and the dark theme.
"""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARTIFACTS = ROOT / "artifacts"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebook = tool("notebook_browser")

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


@pytest.fixture
def browser(chromium_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=notebook.FLAGS)
        yield chromium
        chromium.close()


@pytest.mark.browser
@pytest.mark.parametrize("theme", notebook.THEMES)
def test_the_first_notebook_lives(browser, tmp_path, theme):
    ARTIFACTS.mkdir(exist_ok=True)
    with notebook.jupyter(tmp_path, theme) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address, timeout=90_000)
        try:
            notebook.run_all_cells(page)
        except Exception:
            page.screenshot(path=ARTIFACTS / f"stuck_{theme}.png")
            raise
        assert notebook.errors(page) == []

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
        assert notebook.errors(page) == []
        assert problems == []
        page.close()


# Live figures of each notebook; the first one has a test of its own above.
LIVE = {"01_ced": 2, "02_engram": 2, "03_csa2": 3, "04_fp4": 2, "06_dspark": 2,
        "07_streams_experts": 3, "10_claims": 1}
ALL_NUMBERS = """() => JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map(
    plot => plot.data.map(trace => [Array.from(trace.x || []), Array.from(trace.y || []),
                                    Array.from(trace.base || [])])))"""


def test_every_notebook_is_looked_at_in_a_browser():
    names = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names == {"00_start", *LIVE}


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("name", LIVE)
def test_a_notebook_lives(browser, tmp_path, name):
    """It runs to its end, its figures have data, and a slider changes one. Screenshots are kept."""
    ARTIFACTS.mkdir(exist_ok=True)
    with notebook.jupyter(tmp_path, "light", f"{name}.ipynb") as address:
        page = browser.new_page(viewport={"width": 1440, "height": 1800})
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address, timeout=90_000)
        notebook.run_all_cells(page)
        told = notebook.errors(page)
        assert all("not started" in text for text in told), told
        assert len(told) == page.locator(".jp-CodeCell:has-text('NotImplementedError')").count() > 0
        page.wait_for_function(
            f"document.querySelectorAll('.js-plotly-plot').length >= {LIVE[name]}", timeout=60_000)
        figures = page.evaluate(FIGURES)
        assert len(figures) == LIVE[name]
        for figure in figures:
            assert max(figure["points"]) >= 2 and figure["drawn"] > 10
        before = page.evaluate(ALL_NUMBERS)
        handle = page.locator(".labkit:has(.js-plotly-plot) .noUi-handle").first
        handle.scroll_into_view_if_needed()
        handle.focus()
        for key in ("ArrowLeft", "ArrowRight", "ArrowRight"):   # one end is where it may stand
            page.keyboard.press(key)
            page.wait_for_timeout(1_000)
            if page.evaluate(ALL_NUMBERS) != before:
                break
        assert page.evaluate(ALL_NUMBERS) != before, "no figure followed its slider"
        for number, part in enumerate(page.locator(".labkit:has(.js-plotly-plot)").all()):
            part.scroll_into_view_if_needed()
            part.screenshot(path=ARTIFACTS / f"{name}_{number}.png")
        assert all("not started" in text for text in notebook.errors(page)) and problems == []
        page.close()


@pytest.mark.browser
def test_a_failing_cell_is_seen(browser, tmp_path):
    source = '''# %% id="complaint"
import sys
print("not well", file=sys.stderr)

# %% id="failure"
1 / 0

# %% id="never"
print("not reached")
'''
    folder = tmp_path / "notebooks"
    folder.mkdir()
    made = tool("build_notebooks").notebook(source)
    (folder / "00_start.ipynb").write_text(made, encoding="utf-8")
    with notebook.jupyter(tmp_path / "lab", "light", notebooks=folder) as address:
        page = browser.new_page()
        page.goto(address, timeout=90_000)
        notebook.run_all_cells(page)
        told = notebook.errors(page)
        page.close()
    assert len(told) == 2
    assert "not well" in told[0] and "ZeroDivisionError" in told[1]


def move_the_query_by_keyboard(page):
    """The slider takes the focus and the arrow keys; figure and caption follow."""
    before = page.evaluate(VALUES, "window tokens")
    caption = page.locator("p[role=status]").last
    assert "query 290" in caption.inner_text()
    handle = page.locator(".widget-slider:has-text('query') [role=slider]").first
    if handle.count() == 0:
        handle = page.locator(".widget-slider:has-text('query') .noUi-handle").first
    handle.focus()
    # A key at a time, so that every move is seen to arrive.
    for query in (289, 288, 287):
        page.keyboard.press("ArrowLeft")
        # Looked up anew each time: a new caption is a new element.
        page.wait_for_function(
            "query => [...document.querySelectorAll('p[role=status]')].at(-1)"
            ".innerText.includes(`query ${query} `)", arg=query, timeout=20_000)
    page.wait_for_function(
        f"(before) => JSON.stringify(({VALUES})('window tokens')) !== JSON.stringify(before)",
        arg=before, timeout=20_000)
    assert len(before) > 0


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
    notebook.show_explorer(page)
    page.screenshot(path=ARTIFACTS / f"00_start_{theme}.png")
