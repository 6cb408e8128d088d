"""What all tests share: threads and seeds, browser rules, and the closing summary."""

import os
import random
from collections import Counter

import hypothesis
import numpy
import pytest
import torch

# The models of the tests are tiny: a second thread would only be waited for.
torch.set_num_threads(1)

# Examples are drawn from the test's own name, so a run can be repeated; nothing is timed.
hypothesis.settings.register_profile(
    "lab", derandomize=True, deadline=None, max_examples=15, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile(
    "long", parent=hypothesis.settings.get_profile("lab"), max_examples=400
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "lab"))

CELLS = pytest.StashKey[int]()
MUTANTS = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[CELLS] = 0
    config.stash[MUTANTS] = []


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


# ------------------------------------------------------------------------------ browser
def without_browser(reason):
    """What a browser test does when there is none: a failure in CI, a reported skip elsewhere."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{reason}; with CI=true the browser tests must run", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium_path():
    """The path of a browser that Playwright can drive."""
    from labkit.doctor import find_browser

    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        without_browser("playwright is not installed")
    path = find_browser()
    if path is None:
        without_browser("no Chromium, Chrome or Edge found (LABKIT_BROWSER may name one)")
    return path


# ------------------------------------------------------------------------------ summary
@pytest.fixture
def mutant_rows(request):
    """Where the mutant tests leave their rows for the closing summary."""
    return request.config.stash[MUTANTS]


def pytest_collection_finish(session):
    session.config.stash[CELLS] = sum(type(item).__name__ == "IPyNbCell" for item in session.items)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("the lab")
    terminalreporter.write_line(f"{config.stash[CELLS]} notebook cells collected")
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"{sum(reasons.values())} skipped")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"  {count} x {reason}")
    rows = config.stash[MUTANTS]
    if rows:
        from labkit.mutants import main_text

        terminalreporter.write_line(main_text(rows))
    else:
        terminalreporter.write_line("mutants: none were run")


def _reason(report):
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")
