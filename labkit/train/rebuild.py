"""`labkit rebuild`: everything in the repository that depends on `data/mini`, made anew."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from labkit.errors import CheckpointError, LabError
from labkit.lab import load
from labkit.pages import between_markers
from labkit.paths import data_dir
from labkit.text.train_tokenizer import train_mini_tokenizer
from labkit.train.draft_command import measure_there
from labkit.train.draft_record import read_draft_record
from labkit.train.figure_tables import figures_text
from labkit.train.figures import measure
from labkit.train.readme import readme_part
from labkit.train.record import training_record
from labkit.train.runs import logs_of, read_log, read_plain, read_runs


def rebuild(say: Callable[[str], None] = print) -> None:
    """Check the vocabulary, measure the model and its draft, write the record, build notebooks
    and pictures."""
    mini = data_dir() / "mini"
    root = data_dir().parent
    tools = [root / "tools" / name for name in (
        "build_notebooks.py", "run_solutions.py", "take_pictures.py")]
    readme = root / "README.md"
    for path in (mini / "log.jsonl", mini / "run.json", readme, *tools):
        if not path.is_file():  # told before minutes of measuring, not after
            raise LabError(f"{path} is missing: rebuild works in a clone of the repository, on "
                           "what labkit export wrote")
    say("1/5 vocabulary: training it again must give data/mini/tokenizer.json")
    if trained_vocabulary() != (mini / "tokenizer.json").read_text(encoding="utf-8"):
        raise CheckpointError(f"{mini / 'tokenizer.json'} is not what the corpus gives: restore "
                              "it, or train the model again with the new one")
    runs, log = read_runs(mini), read_log(mini / "log.jsonl")
    # Refuse what does not fit before minutes of measuring.
    logs_of(runs, log), read_plain(mini), between_markers(readme.read_text(encoding="utf-8"), "")
    say("2/5 draft: data/mini/draft_figures.json, draft_calibration.json")
    lab = load("mini", device="cpu")
    if lab.has_draft:
        measure_there(mini)
        lab = load("mini", device="cpu")  # with the new calibration
    draft = read_draft_record(mini)
    say("3/5 figures: data/mini/figures.json")
    figures = measure(lab, draft=None if draft is None else draft.figures)
    write(mini / "figures.json", json.dumps(figures.to_dict(), indent=1, ensure_ascii=False) + "\n")
    say(figures_text(figures))
    say("4/5 record: data/mini/TRAINING.md, README.md")
    write(mini / "TRAINING.md", training_record(lab.config, runs, log, figures, draft))
    write(readme, between_markers(readme.read_text(encoding="utf-8"),
                                  readme_part(figures, runs, draft)))
    say("5/5 notebooks and pictures")
    for path in tools:
        if subprocess.run([sys.executable, str(path)], cwd=root).returncode:
            raise LabError(f"{path.name} failed (see above): mend it and run labkit rebuild again")


def trained_vocabulary() -> str:
    """What training the vocabulary gives, as the text of a tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder:
        train_mini_tokenizer(Path(folder) / "tokenizer.json")
        return (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
