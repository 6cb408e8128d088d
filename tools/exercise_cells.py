"""The cells of an exercise, read from its module in labkit/exercises/tasks without running it.

In a source of a notebook the line

    # %% exercise="engram_rows"

stands for four cells: what is asked, the stub (or the solution), the check, and under folds the
help in three steps, the solution and what it shows. Standard library only.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parents[1] / "labkit" / "exercises" / "tasks"
WIDTH = 88
STEPS = ("Help 1: orientation", "Help 2: the key step", "Help 3: almost the code")


def read_task(id: str, folder: Path = TASKS) -> dict[str, Any]:
    """The constants of an exercise's module, and under `code` its solution's source lines.

    ValueError where the module or one of these is missing.
    """
    path = folder / f"{id}.py"
    if not path.is_file():
        raise ValueError(f"there is no exercise {id!r} in {folder.name}")
    source = path.read_text(encoding="utf-8")
    found: dict[str, Any] = {"id": id}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue                                  # MISTAKES, made of functions
            for name, one in zip(names, value if len(names) > 1 else [value], strict=True):
                assert isinstance(name, ast.Name)
                found[name.id] = one
        if isinstance(node, ast.FunctionDef) and node.name == "solution":
            found["node"] = node
            found["code"] = ast.get_source_segment(source, node)
    for name in ("NUMBER", "TITLE", "FUNCTION", "MINUTES", "DIFFICULTY", "IMPORTANCE", "OBJECTIVE",
                 "HELP", "AFTER", "code"):
        if name not in found:
            raise ValueError(f"{path.name} lacks {name}")
    return found


def solution(task: dict[str, Any]) -> str:
    """The solution under the name that the learner is to give it."""
    return str(task["code"]).replace("def solution(", f"def {task['FUNCTION']}(", 1)


def stub(task: dict[str, Any]) -> str:
    """Signature and docstring of the solution, and nothing behind them."""
    node = task["node"]
    lines = str(task["code"]).splitlines()
    first = node.body[0]
    has_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if not has_doc:
        raise ValueError(f"the solution of {task['id']} has no docstring, so its stub says nothing")
    kept = lines[: first.end_lineno - node.lineno + 1]
    kept[0] = kept[0].replace("def solution(", f"def {task['FUNCTION']}(", 1)
    hint = f"Write {task['FUNCTION']}. Help is below."
    return "\n".join([*kept, f'    raise NotImplementedError("{hint}")'])


def cells(id: str, solved: bool, folder: Path = TASKS) -> list[dict[str, Any]]:
    """nbformat cells: for the learner (`solved` False), or with the solution filled in."""
    task = read_task(id, folder)
    name = f"ex-{task['NUMBER'].replace('.', '-')}"
    asked = [f"### Exercise {task['NUMBER']}: {task['TITLE']}", "",
             f"*{task['MINUTES']} minutes, difficulty {task['DIFFICULTY']} of 5, importance "
             f"{task['IMPORTANCE']} of 5*", "", _text(task["OBJECTIVE"])]
    helped = [_folded(title, _text(text)) for title, text in zip(STEPS, task["HELP"], strict=True)]
    helped += [_folded("Solution", f"```python\n{solution(task)}\n```"),
               _folded("What it shows, and what the check cannot see", _text(task["AFTER"]))]
    code = solution(task) if solved else stub(task)
    return [_cell("markdown", name, "\n".join(asked)),
            _cell("code", f"{name}-code", code, ["exercise"]),
            _cell("code", f"{name}-check", f'check("{id}", {task["FUNCTION"]})',
                  [] if solved else ["raises-exception"]),
            _cell("markdown", f"{name}-help", "\n\n".join(helped))]


def _text(text: str) -> str:
    """Markdown of a task, its paragraphs set anew to the width of a cell; code as it is."""
    lines: list[str] = []
    paragraph: list[str] = []

    def finish() -> None:
        if paragraph:
            lines.extend(textwrap.wrap(" ".join(paragraph), WIDTH, break_long_words=False,
                                       break_on_hyphens=False))
            paragraph.clear()

    # The first line of a text in a tuple stands behind its quotes, so it has no indent.
    first, _, rest = text.strip("\n").partition("\n")
    fenced = False
    for line in [first.strip(), *textwrap.dedent(rest).split("\n")] if rest else [first.strip()]:
        fence = line.lstrip().startswith("```")
        if fence or fenced or not line or line.startswith(("    ", "- ", "|")):
            finish()
            lines.append(line)
            fenced = fenced != fence
        else:
            paragraph.append(line.strip())
    finish()
    return "\n".join(lines).strip("\n")


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _cell(kind: str, id: str, source: str, tags: list[str] | None = None) -> dict[str, Any]:
    return {"cell_type": kind, "id": id, "metadata": {"tags": tags} if tags else {},
            "source": source.splitlines(keepends=True)}
