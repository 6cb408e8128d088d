"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labkit.errors import InputError


class StopFilter:
    """Lets text through until a stop string is complete; the stop string is never let through.

    A token boundary may fall inside a stop string, so an end of the text that could still grow
    into one is held back. What comes out does not depend on how the text was cut into pieces:
    the stop string that is complete first ends it (the longest, when two end together).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that `piece` sets free; `stopped` tells whether the end was reached."""
        if self.stopped:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text follows."""
        rest, self._held = self._held, ""
        return rest

    def _open_end(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


def checked_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string or several -> a tuple; InputError for an empty string or another type."""
    if stop is not None and not isinstance(stop, Iterable):
        raise InputError(f"stop is {stop!r}: it must be a string or a list of strings")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for one in stops:
        if not isinstance(one, str) or not one:
            raise InputError(f"stop holds {one!r}: each stop string must be text of at least one "
                             "character")
    return stops
