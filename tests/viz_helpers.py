"""What tests of figures and explorers share."""

from __future__ import annotations

import warnings

import labkit


def nano_lab() -> labkit.lab.Lab:
    """The preset nano, whose weights are random; the warning that says so is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return labkit.load("nano", device="cpu")
