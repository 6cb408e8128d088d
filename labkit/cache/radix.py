"""A radix tree over token ids: which stored states begin as this text begins?

The index of a prefix cache. A *mark* says that the state after so many tokens of a text is kept
somewhere under a value; a new text asks which marks lie on its own way. Ids that nothing
branches off are one edge, so a text of a million ids with one mark is one node. Plain Python
over machine integers: this module needs no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from labkit.errors import InputError

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Match(Generic[V]):
    """How far a text follows the tree.

    length  leading ids of the text that some marked prefix begins with
    marks   (length, value) of every mark on the way, ascending; none is longer than `length`
    below   (length, value) of the nearest mark beyond `length`, on any branch: its own first
            `length` ids are those of the text; None if the tree goes no further
    """

    length: int
    marks: tuple[tuple[int, V], ...]
    below: tuple[int, V] | None


class _Node(Generic[V]):
    """The end of an edge; the root is the end of none."""

    __slots__ = ("edge", "end", "parent", "children", "marked", "value")

    def __init__(self, edge: array[int], end: int, parent: _Node[V] | None) -> None:
        self.edge = edge                         # ids from the parent to here
        self.end = end                           # number of ids from the root to here
        self.parent = parent
        self.children: dict[int, _Node[V]] = {}  # by the first id of their edge
        self.marked = False
        self.value: V | None = None              # says something only if `marked`


class RadixTree(Generic[V]):
    """Marks on prefixes of texts; a value stands in the tree at most once.

    Every node but the root is marked or branches, so the tree holds what its marks need and no
    more: ids behind the last mark of a text are not kept, and what only a discarded mark needed
    goes with it. Nothing recurses: a text may have any number of marks.
    """

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(array("q"), 0, None)
        self._where: dict[V, _Node[V]] = {}
        self._nodes = 0
        self._tokens = 0

    def __len__(self) -> int:
        """The number of marks."""
        return len(self._where)

    def __contains__(self, value: object) -> bool:
        return value in self._where

    @property
    def nodes(self) -> int:
        """Nodes without the root, which is always there."""
        return self._nodes

    @property
    def tokens(self) -> int:
        """Ids held in edges, 8 bytes each; a prefix that texts share is held once."""
        return self._tokens

    def get(self, value: V) -> int:
        """How many ids lead to the mark of that value; KeyError if there is none."""
        return self._where[value].end

    def match(self, ids: Sequence[int]) -> Match[V]:
        """Follow `ids` as far as the tree goes; linear in the ids.

        Looking for `below` visits the unmarked branchings behind the end and their children:
        as many steps as texts part there.
        """
        text = array("q", ids)
        node, length = self._root, 0
        marks: list[tuple[int, V]] = []
        while length < len(text) and (child := node.children.get(text[length])):
            length += _shared(child.edge, text, length)
            if length < child.end:               # the text ends or leaves inside this edge
                return Match(length, tuple(marks), _nearest([child]))
            node = child
            if node.marked:
                marks.append((node.end, cast(V, node.value)))
        return Match(length, tuple(marks), _nearest(node.children.values()))

    def insert(self, ids: Sequence[int], marks: Mapping[int, V]) -> None:
        """Set marks on prefixes of a text, {length of the prefix (1..len(ids)): value}.

        A value that stood at the same place before is replaced. All marks are set on one walk,
        linear in the ids. InputError, with nothing changed, for a length out of range or a value
        that stands (or would stand) at two places.
        """
        if not marks:
            return
        places = sorted(marks)
        for place in (places[0], places[-1]):
            if not 1 <= place <= len(ids):
                raise InputError(f"a mark at length {place} is not on a text of {len(ids)} ids: "
                                 f"give lengths in 1..{len(ids)}")
        text = array("q", ids[: places[-1]])
        self._refuse_second_places(text, marks)
        node, done = self._root, 0
        while done < len(places):
            child = node.children.get(text[node.end])
            if child is None:                    # all that is left is new: a chain, mark by mark
                for place in places[done:]:
                    node = self._grow(node, text[node.end : place])
                    self._mark(node, marks[place])
                return
            agree = node.end + _shared(child.edge, text, node.end)
            reached = done
            while reached < len(places) and places[reached] <= agree:
                reached += 1
            # The edge is cut at the marks inside it and where the text leaves it.
            ends = sorted({*places[done:reached], agree})
            for node in self._cut(child, ends):
                if node.end in marks:
                    self._mark(node, marks[node.end])
            done = reached

    def discard(self, value: V) -> bool:
        """Remove the mark of that value, and all that only it needed; False if there is none.

        Costs at most the length of a text: an edge may have to be joined with the next.
        """
        node = self._where.pop(value, None)
        if node is None:
            return False
        node.marked, node.value = False, None
        if node.parent and not node.children:    # a leaf goes; what stays branches or is marked
            self._nodes -= 1
            self._tokens -= len(node.edge)
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent and not node.marked and len(node.children) == 1:
            self._merge(node)
        return True

    def _refuse_second_places(self, text: array[int], marks: Mapping[int, V]) -> None:
        """A value may be set again where it stands already, nowhere else."""
        if len(set(marks.values())) < len(marks):
            raise InputError("a value can mark one length only: give each length its own")
        if any(value in self._where for value in marks.values()):
            here = {value: length for length, value in self.match(text).marks}
            for length, value in marks.items():
                if value in self._where and here.get(value) != length:
                    raise InputError(f"{value!r} already marks another place, at length "
                                     f"{self.get(value)}: discard it first")

    def _mark(self, node: _Node[V], value: V) -> None:
        if node.marked:
            del self._where[cast(V, node.value)]
        node.marked, node.value = True, value
        self._where[value] = node

    def _grow(self, parent: _Node[V], edge: array[int]) -> _Node[V]:
        """A new child at the end of `edge`."""
        node = _Node(edge, parent.end + len(edge), parent)
        parent.children[edge[0]] = node
        self._nodes += 1
        self._tokens += len(edge)
        return node

    def _cut(self, node: _Node[V], ends: list[int]) -> list[_Node[V]]:
        """The nodes at `ends` on the edge into `node`, made where there are none; ascending.

        All cuts of an edge at once: one by one, each would copy what is left of a long edge.
        """
        parent = cast("_Node[V]", node.parent)
        edge, start = node.edge, parent.end
        on_edge = []
        for end in ends:
            if end == node.end:
                on_edge.append(node)
                break
            parent = self._grow(parent, edge[parent.end - start : end - start])
            on_edge.append(parent)
        if parent is not node.parent:
            node.edge, node.parent = edge[parent.end - start :], parent
            parent.children[node.edge[0]] = node
            self._tokens -= parent.end - start   # these moved: they were counted twice
        return on_edge

    def _merge(self, node: _Node[V]) -> None:
        """Join a node that neither ends nor branches anything with its only child."""
        (child,) = node.children.values()
        node.edge.extend(child.edge)             # in place: the upper edge may be the long one
        child.edge, child.parent = node.edge, node.parent
        cast("_Node[V]", node.parent).children[child.edge[0]] = child
        self._nodes -= 1


def _shared(edge: array[int], text: array[int], start: int) -> int:
    """How many leading ids of `edge` are those of `text` from `start` on."""
    piece = text[start : start + len(edge)]
    if piece == (edge if len(piece) == len(edge) else edge[: len(piece)]):
        return len(piece)
    return next(i for i, (a, b) in enumerate(zip(edge, piece, strict=False)) if a != b)


def _nearest(nodes: Iterable[_Node[V]]) -> tuple[int, V] | None:
    """The shortest mark at or below any of the nodes; of equals any."""
    best: _Node[V] | None = None
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if best is not None and node.end >= best.end:
            continue
        if node.marked:
            best = node
        else:
            waiting.extend(node.children.values())
    return None if best is None else (best.end, cast(V, best.value))
