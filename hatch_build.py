"""Puts data/ into wheels, as labkit/_data.

An editable install reads data/ where it lies; a static force-include would copy it there too.
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        data = Path(self.root, "data")
        if version == "standard" and data.is_dir():
            build_data["force_include"][str(data)] = "labkit/_data"
