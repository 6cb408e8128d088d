"""The optimiser of Engram tables: equal rows and columns, rows that rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.train.tables import TableMomentum, equalise


@given(rows=st.integers(8, 60), width=st.integers(4, 16), seed=st.integers(0, 999))
def test_rows_and_columns_come_out_equally_large(rows, width, seed):
    """Whatever their sizes were: here rows differ by up to 1,000,000, columns by up to 100."""
    made = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, width, generator=made, dtype=torch.float64)
    sizes = 10 ** (6 * torch.rand(rows, 1, generator=made, dtype=torch.float64))
    found = equalise(m * sizes * torch.logspace(0, 2, width, dtype=torch.float64))
    assert found.square().mean(1).sqrt() == pytest.approx(torch.ones(rows), abs=1e-12)
    assert (found.square().mean(0).sqrt() - 1).abs().max() < 0.1
    # Only positive factors: signs stay, and the size of the whole does not matter.
    assert torch.equal(found.sign(), m.sign())
    assert torch.allclose(equalise(1e-9 * found), equalise(found), rtol=1e-9)


def test_a_row_of_zeros_stays_zero():
    m = torch.ones(3, 4)
    m[1] = 0
    assert torch.equal(equalise(m), m)


def test_rows_without_a_gradient_rest():
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 8)
    before = table.weight.detach().clone()
    optimizer = TableMomentum([table.weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (table(torch.tensor([2, 5, 5, 11])) * torch.randn(4, 8)).sum().backward()
        optimizer.step()
    moved = (table.weight.detach() - before).abs().amax(1) > 0
    assert moved.nonzero()[:, 0].tolist() == [2, 5, 11]
    held = optimizer.state[table.weight]["momentum_buffer"].abs().amax(1) > 0
    assert torch.equal(held, moved)


def test_a_step_has_the_size_of_the_learning_rate_whatever_the_gradient():
    for size in (1e-6, 1.0, 1e4):
        torch.manual_seed(1)
        table = torch.nn.Parameter(torch.zeros(30, 8))
        table.grad = size * torch.randn(30, 8)
        TableMomentum([table], lr=0.01).step()
        assert table.detach().square().mean(1).sqrt() == pytest.approx(torch.full((30,), 0.01))
        assert (table.detach() * table.grad).sum() < 0


def test_it_finds_a_table():
    """Rows met now and then go to their targets, as the learning rate falls."""
    torch.manual_seed(2)
    wanted = torch.randn(50, 8)
    table = torch.nn.Parameter(torch.zeros(50, 8))
    optimizer = TableMomentum([table], lr=0.05)
    for step in range(600):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 600)
        rows = torch.randint(50, (10,))
        optimizer.zero_grad()
        (table[rows] - wanted[rows]).square().sum().backward()
        optimizer.step()
    assert float((table.detach() - wanted).abs().mean()) < 0.05
