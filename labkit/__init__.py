"""labkit: DeepSeek-V4.1-Flash, computed whole at any scale, for people who want to see it."""

from __future__ import annotations

from typing import Any

from labkit.config import ModelConfig
from labkit.errors import CheckpointError, ConfigError, InputError, LabError, StoreError

__version__ = "0.1.0"
__all__ = [
    "CheckpointError", "ConfigError", "InputError", "LabError", "ModelConfig", "StoreError",
    "__version__", "load",
]


def __getattr__(name: str) -> Any:
    # `load` pulls in torch; `import labkit` alone (for --version, for the planner) does not.
    if name == "load":
        from labkit.lab import load

        return load
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")
