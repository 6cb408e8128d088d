"""The house has floors: a module imports only from its own floor and from those below it.

The order is docs/architecture.md's; a new module of labkit needs a place in both.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. Names of one line share a floor and may import each other.
FLOORS = [
    ["errors", "pages", "paths"],
    ["config", "config_rules", "primes"],
    ["numerics"],
    ["text"],
    ["trace"],
    ["store"],
    ["cache"],
    ["kernels"],
    ["model"],
    ["checkpoint"],
    ["engine"],
    ["lab"],
    ["distributed"],
    ["train"],
    ["serving"],
    ["viz"],
    ["explorers"],
    ["exercises", "mutants"],
    ["cli", "cli_course", "cli_training", "doctor", "tables", "__main__"],
]
FLOOR_OF = {name: level for level, names in enumerate(FLOORS) for name in names}


def imported_modules(source: str, package: list[str]) -> set[str]:
    """Dotted names under labkit that a file imports anywhere, functions included.

    `package` is the file's package (['labkit', 'model']), which relative imports start from.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # `from labkit import kernels` names the module in the list of names
            found |= {".".join(base + [alias.name]) for alias in node.names}
    return {name for name in found if name.split(".")[0] == "labkit"}


def violations(files: dict[str, str]) -> list[str]:
    """Sentences about imports that go up; `files` maps 'labkit/model/rope.py' to its source."""
    told = []
    for path, source in sorted(files.items()):
        parts = path.removesuffix(".py").split("/")
        if parts == ["labkit", "__init__"]:
            continue  # the front door: offers names from every floor
        own = FLOOR_OF.get(parts[1])
        if own is None:
            told.append(f"{path}: {parts[1]} has no floor; add it to FLOORS and the document")
            continue
        for name in sorted(imported_modules(source, parts[:-1])):
            target = name.split(".")[1] if "." in name else ""
            if target in FLOOR_OF and FLOOR_OF[target] > own:
                told.append(f"{path} imports {name}, which is on a higher floor")
    return told


def test_no_module_imports_from_a_higher_floor():
    paths = sorted((ROOT / "labkit").rglob("*.py"))
    files = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    assert len(files) > 10
    assert violations(files) == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("labkit/model/rope.py", "from labkit.engine import decode"),
        ("labkit/model/rope.py", "import labkit.engine.decode"),
        ("labkit/model/rope.py", "from labkit import engine"),
        ("labkit/model/rope.py", "from ..engine import decode"),
        ("labkit/model/rope.py", "from .. import engine"),
        ("labkit/model/rope.py", "def f():\n    from labkit.engine import decode"),
        ("labkit/config.py", "from .numerics import formats"),
        ("labkit/errors.py", "from labkit.config import ModelConfig"),
        ("labkit/attic/thing.py", ""),
    ],
)
def test_the_checker_sees_a_violation(path, source):
    assert len(violations({path: source})) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("labkit/model/rope.py", "from labkit.config import ModelConfig"),
        ("labkit/model/rope.py", "from .norm import RMSNorm\nfrom . import norm"),
        ("labkit/model/rope.py", "from labkit import __version__\nimport torch"),
        ("labkit/cli.py", "from labkit import doctor, engine"),
        ("labkit/__init__.py", "from labkit.engine import x"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(path, source):
    assert violations({path: source}) == []


def test_the_document_lists_the_same_floors():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", text, flags=re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == FLOORS
