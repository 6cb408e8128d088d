"""Batches of survivals and curves of step rates, for the tests of verify lengths."""

from hypothesis import strategies as st

from labkit.engine.scheduling import StepRate, survival

# Few values, so that ties within and between requests are common.
CONFIDENCE = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def batches(draw, most=64):
    """Survivals of 1 to `most` requests with up to 5 slots each."""
    requests = draw(st.integers(1, most))
    rows = st.lists(CONFIDENCE, max_size=5).map(survival)
    return draw(st.lists(rows, min_size=requests, max_size=requests))


@st.composite
def curves(draw, largest=64 * 6):
    """Jagged rates, measured for 1 to `largest` tokens at some points."""
    points = draw(st.sets(st.integers(2, largest - 1), max_size=8)) | {1, largest}
    return StepRate({b: draw(st.floats(0.1, 10)) for b in points})


def step(policy, rows):
    """A step that is taken."""
    lengths = policy.lengths(rows)
    policy.done()
    return lengths
