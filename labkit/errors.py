"""What labkit raises when the user can do something about it.

Each message is one sentence that names the thing, the value found and the remedy; the
command line prints it without a traceback.
"""


class LabError(Exception):
    """Base of every error that is the caller's to mend."""


class ConfigError(LabError, ValueError):
    """A config.json field (or a combination of fields) breaks a rule of the architecture."""


class CheckpointError(LabError, ValueError):
    """A checkpoint folder lacks a file or tensor, or holds one of the wrong shape or dtype."""


class InputError(LabError, ValueError):
    """Ids, lengths, prompts or options that the model cannot take."""


class StoreError(LabError):
    """A store of pages that cannot be opened, read or written, or whose options make no sense."""
