"""Pages of Markdown of which a part is measured: it stands between two lines and is replaced."""

from __future__ import annotations

from labkit.errors import InputError

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def between_markers(page: str, measured: str) -> str:
    """The page with what stands between its two markers replaced; InputError without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"the page lacks the lines {BEGIN} and {END}: put them around the part "
                         "that is measured")
    return f"{before}{BEGIN}\n\n{measured.strip()}\n\n{END}{after}"


def plain_marks(text: str) -> str:
    """The text with what Markdown would read as marks made plain."""
    for mark in "\\`*_<>[]#|":
        text = text.replace(mark, "\\" + mark)
    return text
