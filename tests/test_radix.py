"""The radix tree against a plain dictionary {prefix: value}, and what it costs."""

import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.cache import radix
from labkit.cache.radix import Match, RadixTree
from labkit.errors import InputError

# Two ids and short texts: prefixes are shared and edges are cut all the time.
TEXTS = st.lists(st.integers(0, 1), max_size=9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TEXTS, st.sets(st.integers(1, 9), max_size=4)),
        st.tuples(st.just("again"), TEXTS, st.sets(st.integers(1, 9), max_size=4)),
        st.tuples(st.just("discard"), st.integers(0, 40), st.none()),
        st.tuples(st.just("match"), TEXTS, st.none()),
    ),
    min_size=10, max_size=40)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))


def expected_match(plain, text):
    """(length, marks, lengths that `below` may have) by looking at every mark."""
    length = max((shared(prefix, text) for prefix in plain), default=0)
    marks = sorted((len(p), v) for p, v in plain.items() if p == text[: len(p)])
    beyond = {p: v for p, v in plain.items() if p[:length] == text[:length] and len(p) > length}
    nearest = min(map(len, beyond), default=None)
    return length, tuple(marks), {(len(p), v) for p, v in beyond.items() if len(p) == nearest}


def check(tree, plain):
    """The tree is the smallest that holds these marks, and its counts are those of its nodes."""
    waiting, found, nodes, tokens = [((), tree._root)], {}, 0, 0
    while waiting:
        above, node = waiting.pop()
        text = above + tuple(node.edge)
        assert node.end == len(text)
        if node is not tree._root:
            assert len(node.edge) > 0 and node.parent.children[node.edge[0]] is node
            assert node.marked or len(node.children) > 1, "a node that nothing needs"
            nodes, tokens = nodes + 1, tokens + len(node.edge)
        if node.marked:
            found[text] = node.value
        waiting += [(text, child) for child in node.children.values()]
    assert found == plain
    assert (len(tree), tree.nodes, tree.tokens) == (len(plain), nodes, tokens)
    every = {p[:n] for p in plain for n in range(1, len(p) + 1)}
    assert tokens == len(every), "an id held twice, or one that no mark needs"
    for prefix, value in plain.items():
        assert value in tree and tree.get(value) == len(prefix)


@given(STEPS)
def test_any_steps_equal_a_dictionary_of_prefixes(steps):
    tree, plain, fresh = RadixTree(), {}, 0
    for kind, what, places in steps:
        if kind in ("insert", "again"):
            marks = {}
            for place in sorted(p for p in places if p <= len(what)):
                prefix = tuple(what[:place])
                if kind == "again" and prefix in plain:  # the same value at the same place
                    marks[place] = plain[prefix]
                else:                                    # a new place, or a value is replaced
                    marks[place], fresh = f"v{fresh}", fresh + 1
                plain[prefix] = marks[place]
            tree.insert(what, marks)
        elif kind == "discard":
            value = f"v{what}"
            assert tree.discard(value) == (value in plain.values())
            plain = {p: v for p, v in plain.items() if v != value}
            assert value not in tree
        else:
            length, marks, below = expected_match(plain, tuple(what))
            found = tree.match(what)
            assert (found.length, found.marks) == (length, marks)
            assert found.below in below if below else found.below is None
        check(tree, plain)


@given(st.lists(st.tuples(TEXTS.filter(bool), st.integers(1, 9)), max_size=12), st.randoms())
def test_a_tree_without_its_marks_is_empty(texts, order):
    tree = RadixTree()
    for number, (text, place) in enumerate(texts):
        tree.insert(text, {min(place, len(text)): number})
    values = [number for number in range(len(texts)) if number in tree]
    order.shuffle(values)
    assert all(tree.discard(value) for value in values)
    assert (len(tree), tree.nodes, tree.tokens) == (0, 0, 0)
    assert tree.match([0, 1]) == Match(0, (), None)


def test_a_conversation_and_its_branches():
    tree = RadixTree()
    tree.insert([5, 6, 7, 8, 9, 9], {2: "system", 4: "first turn"})
    assert (tree.nodes, tree.tokens) == (2, 4)                   # nothing behind the last mark
    tree.insert([5, 6, 7, 1, 1], {5: "other turn"})
    assert (tree.nodes, tree.tokens) == (4, 6)                   # 56 | 7 | 8 and 11
    assert tree.match([5, 6, 7]) == Match(3, ((2, "system"),), (4, "first turn"))
    assert tree.match([5, 6, 7, 1, 2]) == Match(4, ((2, "system"),), (5, "other turn"))
    assert tree.match([5, 6, 7, 8, 3]) == Match(4, ((2, "system"), (4, "first turn")), None)
    assert tree.match([4]) == Match(0, (), (2, "system"))
    assert tree.discard("first turn") and (tree.nodes, tree.tokens) == (2, 5)  # 56 | 711
    assert tree.discard("system") and (tree.nodes, tree.tokens) == (1, 5)
    assert tree.match([5, 6, 7]) == Match(3, (), (5, "other turn"))
    assert not tree.discard("system")


@pytest.mark.parametrize("ids, marks, told", [
    ([1, 2, 3], {4: "x"}, "length 4 is not on a text of 3 ids"),
    ([1, 2, 3], {0: "x", 2: "y"}, "length 0 is not on"),
    ([1, 2, 3], {2: "x", 3: "x"}, "one length only"),
    ([1, 2, 4], {2: "new", 3: "old"}, "'old' already marks another place, at length 3"),
    ([1, 2, 3, 4], {2: "new", 4: "old"}, "'old' already marks another place, at length 3"),
])
def test_marks_that_cannot_be_are_refused_and_change_nothing(ids, marks, told):
    tree = RadixTree()
    tree.insert([1, 2, 3], {3: "old"})
    with pytest.raises(InputError, match=told):
        tree.insert(ids, marks)
    check(tree, {(1, 2, 3): "old"})
    tree.insert([1, 2, 3], {1: "new", 3: "old"})                 # where it stands, it may stay
    check(tree, {(1, 2, 3): "old", (1,): "new"})
    with pytest.raises(KeyError):
        tree.get("nowhere")


def test_any_hashable_is_a_value():
    tree = RadixTree()
    tree.insert((1, 2), {1: None, 2: (False, b"digest")})
    assert tree.match([1, 2]).marks == ((1, None), (2, (False, b"digest")))
    assert tree.get(None) == 1 and tree.discard(None) and None not in tree


# ------------------------------------------------------------------------------- cost
class Counted(array):
    """An array that counts the ids copied and compared by it."""

    ids = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            Counted.ids += len(found)
            return Counted(found.typecode, found)
        return found

    def __eq__(self, other):
        Counted.ids += min(len(self), len(other))
        return super().__eq__(other)

    __hash__ = None

    def extend(self, other):
        Counted.ids += len(other)
        super().extend(other)


def cost(work):
    """Lines of the module that run, and ids that are copied and compared."""
    lines, Counted.ids = 0, 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != radix.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines + Counted.ids


def costs_of_a_text(length, page=128):
    """Each step of a text's life in a tree, with a mark a page."""
    text = [i * 2654435761 % 50021 for i in range(length)]
    marks = {place: place for place in range(page, length + 1, page)}
    tree, long_edge = RadixTree(), RadixTree()
    long_edge.insert(text, {length: "end"})                      # one edge, to be cut in pages
    found = {
        "new": cost(lambda: tree.insert(text, marks)),
        "again": cost(lambda: tree.insert(text, marks)),
        "into one edge": cost(lambda: long_edge.insert(text, marks)),
        "match": cost(lambda: tree.match(text)),
        "match elsewhere": cost(lambda: tree.match([3] * length)),
    }
    assert tree.match(text).length == length // page * page
    assert (len(tree), long_edge.nodes) == (length // page, -(-length // page))
    found["from the front"] = cost(lambda: [tree.discard(place) for place in marks])
    found["from the back"] = cost(lambda: [long_edge.discard(p) for p in reversed(marks)])
    assert (tree.tokens, long_edge.tokens) == (0, length)
    return found


def test_a_text_of_200_000_ids_costs_twice_what_half_of_it_costs(monkeypatch):
    monkeypatch.setattr(radix, "array", Counted)
    half, whole = costs_of_a_text(100_000), costs_of_a_text(200_000)
    for step, steps in whole.items():
        print(f"{step:>16}: {half[step]:9,} -> {steps:9,} lines run and ids touched")
    # A mark before a long edge: joining the two copies that edge, at most the text per mark.
    assert whole.pop("from the back") <= (200_000 // 128) * 200_000
    assert all(steps <= 2.2 * half[step] + 200 for step, steps in whole.items()), (half, whole)
    assert whole["match"] < 4 * 200_000
