"""The vectors' checkpoint as a folder that `labkit.load` takes."""

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def make_folder(folder: Path, case: str = "text") -> Path:
    """config.json of `case`, the weights that it names, and the vectors' tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / case / "config.json").read_text())
    weights = GOLDEN / config.pop("weights_from", case)
    (folder / "config.json").write_text(json.dumps(config))
    for file in (*weights.glob("model*.safetensors"), *weights.glob("*.index.json")):
        shutil.copy(file, folder)
    shutil.copy(GOLDEN / "tokenizer.json", folder)
    return folder
