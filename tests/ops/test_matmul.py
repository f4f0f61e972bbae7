"""Products of ragged batches: what they hold on to, what they cost, and what they say to operands that do not fit."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from texts import Says, T, Texts, says
from texts import ragged as packed_rows

import tdc
from tdc import NestedTensor
from tdc.compile import counted

NAN = float("nan")


def ragged() -> Any:
    return packed_rows()


def batch(*lengths: int, features: int = 4) -> Any:
    torch.manual_seed(0)
    return tdc.pack([torch.randn(n, features) for n in lengths])


def test_structure_is_passed_on():
    x = batch(2, 0, 3)
    products: Any = (x @ torch.ones(4, 2), x @ torch.ones(3, 4, 2), torch.einsum("bld,bd->bl", x, torch.ones(3, 4)))
    for y in products:
        assert y.offsets is x.offsets


def test_attention_by_hand_comes_back_to_its_rows():
    x = batch(2, 0, 3)
    weights = x @ x.transpose(1, 2)
    assert weights.shape == (3, -1, -1)
    assert weights.sizes.tolist() == [[2, 2], [0, 0], [3, 3]]
    out = weights @ x + x
    torch.testing.assert_close(out.unbind(), [r @ r.T @ r + r for r in x.unbind()])


def test_bounds_of_the_longest_row_may_differ():
    x = batch(2, 0, 3)
    wide = NestedTensor(x.values, x.offsets, max_length=9)
    for a, b in ((x, wide), (wide, x)):
        torch.testing.assert_close(a.transpose(1, 2) @ b, x.transpose(1, 2) @ x)
        torch.testing.assert_close((a @ b.transpose(1, 2)).values, (x @ x.transpose(1, 2)).values)


@pytest.mark.parametrize("masked", [False, True])
def test_nan_of_one_row_stays_there(masked: bool):
    rows = [torch.ones(2, 4), torch.full((1, 4), NAN), torch.ones(3, 4)]
    x: Any = tdc.pack(rows).to_padded() if masked else tdc.pack(rows)
    w = torch.ones(3, 4, 2, requires_grad=True)
    y = x @ w
    assert [bool(row.isnan().any()) for row in y.unbind()] == [False, True, False]
    (y.unbind()[0].sum() + y.unbind()[2].sum()).backward()
    assert w.grad is not None
    assert w.grad[[0, 2]].isfinite().all()
    assert [bool(m.isnan().any()) for m in x.transpose(1, 2) @ x] == [False, True, False]


def test_products_of_empty_batches():
    x = batch(0, 0)
    assert torch.equal(x.transpose(1, 2) @ x, torch.zeros(2, 4, 4))
    assert (x @ x.transpose(1, 2)).values.shape == (0,)
    assert (x @ torch.ones(2, 4, 3)).shape == (2, -1, 3)


def test_rows_of_other_lengths_are_noticed():
    x, y = batch(2, 3), batch(3, 2)
    for call in (lambda: x.transpose(1, 2) @ y, lambda: torch.einsum("bld,bld->bl", x, y)):
        with pytest.raises(tdc.StructureError, match="lengths"):
            call()


def test_operands_in_a_list_are_traced():
    x, w = batch(2, 3), torch.ones(4, 5)
    run = torch.compile(lambda x, w: torch.einsum("bld,de->ble", [x, w]), backend="eager", fullgraph=True)
    assert torch.equal(run(x, w).values, x.values @ w)


@pytest.mark.parametrize("name", ["sub", "truediv", "matmul"])
@pytest.mark.parametrize("order", ["left", "right"])
def test_operators_with_a_tensor_are_traced(name: str, order: str):
    x: Any = batch(2, 0, 3).abs() + 1 if name != "matmul" or order == "left" else batch(2, 0, 3).transpose(1, 2)
    w = torch.rand(4, 4)[: 4 if name == "matmul" else 1] + 1
    pair = (x, w) if order == "left" else (w, x)
    call = getattr(operator, name)
    got, want = torch.compile(call, fullgraph=True, backend="eager")(*pair), call(*pair)
    torch.testing.assert_close(got.unbind(), want.unbind())


def test_a_traced_operator_never_guesses_the_order():
    x: Any = tdc.pack([torch.rand(2, 4, 4)])
    w = torch.rand(4, 4)
    with pytest.raises(Exception, match="operands that fit in one order"):
        torch.compile(operator.matmul, fullgraph=True, backend="eager")(x, w)
    assert torch.equal((x @ w).values, x.values @ w)
    assert torch.equal((w @ x).values, w @ x.values)


def test_the_operator_of_two_batches_makes_one_graph():
    def attend(x: Any, y: Any) -> Any:
        return (x @ y.transpose(1, 2)) @ x

    graph = counted(attend, backend="eager")
    for lengths in ((2, 0, 3), (5, 1), (1, 1, 4, 2)):
        x, y = batch(*lengths).requires_grad_(), batch(*lengths)
        out = graph(x, y)
        torch.testing.assert_close(out.values, attend(x, y).values)
        want = torch.autograd.grad(attend(x, y).values.square().sum(), x.values)
        torch.testing.assert_close(torch.autograd.grad(out.values.square().sum(), x.values), want)
    assert (graph.counts.graphs, graph.counts.compiles) == (1, 1)


SAYS: dict[str, Says] = {
    "a number": (lambda: ragged() @ 3, """\
DtypeError
tdc.matmul: expected batches or tensors, got NestedTensor float32[3, -1, 4] and int
hint: x * y for a number"""),
    "inner sizes": (lambda: ragged() @ torch.ones(3, 4), """\
ShapeError
tdc.matmul: expected a last dim that meets the first of the other's matrices, got dim 2 of size 4 and dim 0 of size 3
at operand 0: NestedTensor float32[3, -1, 4]
at operand 1: Tensor float32[3, 4]
hint: x.mT or y.mT swaps the last two dims"""),
    "weights of another batch": (lambda: ragged() @ torch.ones(5, 4, 2), """\
ShapeError
tdc.matmul: expected one size for dim 'A', got 3 and 5
at operand 0, 'Aij': NestedTensor float32[3, -1, 4]
at operand 1, 'Ajk': Tensor float32[5, 4, 2]
hint: a dim that two operands share, as summed and batch dims are, has one size"""),
    "weights along the ragged dim": (lambda: torch.ones(2, 5) @ ragged(), """\
ShapeError
tdc.matmul: expected a last dim that meets the first of the other's matrices, got dim 1 of size 5 and dim 1 ragged
at operand 0: Tensor float32[2, 5]
at operand 1: NestedTensor float32[3, -1, 4]
hint: x.mT or y.mT swaps the last two dims"""),
    "a ragged dim without its batch": (lambda: torch.einsum("bld,bde->le", ragged(), torch.ones(3, 4, 2)), """\
ShapeError
tdc.einsum: expected ragged dims with the batch, 'b', got a result 'le'
hint: sum over the ragged dim as well, or keep the batch dim"""),
    "ragged dims apart": (lambda: torch.einsum("bld,bme->bldme", ragged(), ragged()), """\
ShapeError
tdc.einsum: expected ragged dims side by side, got a result 'bldme'
hint: name ragged dims next to each other"""),
    "two batch letters": (lambda: torch.einsum("bld,cmd->bclm", ragged(), ragged()), """\
StructureError
tdc.einsum: expected a result that is ragged like one of two batches, got 'bclm'
at operand 0, 'bld': NestedTensor float32[3, -1, 4]
at operand 1, 'cmd': NestedTensor float32[3, -1, 4]
hint: q @ d.values.mT of packed d is (B, -1, N) for its N positions; tdc.ops.max_sim(q, d) is (B, C)"""),
    "too few letters": (lambda: torch.einsum("ld,de->le", ragged(), torch.ones(4, 2)), """\
ShapeError
tdc.einsum: expected one letter for each dim, got 'ld,de->le'
at operand 0, 'ld': NestedTensor float32[3, -1, 4]
hint: letters speak of the logical shape: the batch and ragged dims count"""),
    "two kinds": (lambda: ragged().transpose(1, 2) @ ragged().to_padded(), """\
UnsupportedError
tdc.matmul: expected operands of one kind, got NestedTensor and MaskedBatch
hint: convert with to_packed() or to_padded()"""),
    "vectors that are matrices": (lambda: torch.dot(ragged(), ragged()), """\
ShapeError
tdc.dot: expected vectors, one for each example, got NestedTensor float32[3, -1, 4]
hint: x @ y broadcasts over further dims"""),
    "kron the other way round": (lambda: torch.kron(torch.ones(2), ragged()), """\
UnsupportedError
tdc.kron: expected a batch with one ragged dim and a dense tensor behind it, got others
at input: Tensor float32[2]
at other: NestedTensor float32[3, -1, 4]
hint: torch.einsum, or loop over x.unbind()"""),
    "grouped": (lambda: torch.nn.functional.grouped_mm(ragged(), torch.ones(3, 4, 3), offs=T([1])), """\
UnsupportedError
tdc.grouped_mm: expected groups that are the rows of a batch, got offs=
hint: F.grouped_mm(x, weights) for a batch x (B, -1, D) and weights (B, D, E)"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_letter_twice(self):
        maps: Any = tdc.pack([torch.ones(2, 2), torch.ones(3, 3)], ragged_dim=(1, 2))
        self.says(lambda: torch.einsum("bll->bl", maps), """\
StructureError
tdc.einsum: expected letter 'l' once in an operand, got 'bll' for NestedTensor float32[2, -1, -1]
hint: x.diagonal(0, 1, 2) of a pair map""")  # fmt: skip


def test_whole_numbers_and_bools_are_summed_as_torch_does():
    rows = [torch.tensor([200, 100], dtype=torch.uint8), torch.tensor([7], dtype=torch.uint8)]
    x: Any = tdc.pack(rows)
    for y in (x, x.to_padded()):
        assert torch.equal(torch.einsum("bi->b", y), torch.stack([torch.einsum("i->", r) for r in rows]))
        assert torch.equal(torch.einsum("bi,bi->b", y, y), torch.stack([torch.einsum("i,i->", r, r) for r in rows]))
        assert torch.einsum("bi->b", y > 100).tolist() == [1, 0]
        with pytest.raises(tdc.DtypeError, match="expected numbers"):
            torch.einsum("bi,bi->b", y > 0, y > 0)


def test_sums_with_products_of_shared_operands():
    rows = [torch.arange(2 * n).view(n, 2) for n in (3, 1)]
    x: Any = tdc.pack(rows)
    a, b = torch.ones(1, 4, dtype=torch.int64), torch.ones(4, 2, dtype=torch.int64)
    for row, got in zip(rows, torch.addmm(x, a, b, beta=1.7, alpha=2.6).unbind(), strict=True):
        assert torch.equal(got, torch.addmm(row, a.expand(len(row), 4), b, beta=1.7, alpha=2.6))
    v: Any = tdc.pack([torch.tensor([True, False]), torch.tensor([True])])
    for row, got in zip(
        v.unbind(), torch.addr(torch.zeros(1, 2).bool(), v, torch.ones(2).bool()).unbind(), strict=True
    ):
        assert torch.equal(got, torch.outer(row, torch.ones(2).bool()))
    with pytest.raises(tdc.DtypeError, match="whole numbers beta and alpha"):
        torch.addr(x, tdc.pack([r[:, 0] for r in rows]), b[0], alpha=0.5)


def test_products_of_examples_that_are_stacks():
    rows = [torch.randn(n, 2, 3) for n in (2, 0, 1)]
    x, w = tdc.pack(rows), torch.randn(3, 4)
    same = tdc.pack([torch.randn(len(r), 3, 4) for r in rows])
    for got, r, s in zip(torch.bmm(x, same).unbind(), rows, same.unbind(), strict=True):
        torch.testing.assert_close(got, torch.bmm(r, s))
    sums: Any = torch.addbmm(torch.ones(2, 4), x, same)
    for got, r, s in zip(sums, rows, same.unbind(), strict=True):
        torch.testing.assert_close(got, torch.addbmm(torch.ones(2, 4), r, s))
    for got, r in zip(torch.inner(torch.tensor(2.0), x).unbind(), rows, strict=True):
        torch.testing.assert_close(got, torch.inner(torch.tensor(2.0), r))
    with pytest.raises(tdc.ShapeError, match="stacks of matrices"):
        torch.bmm(x, w)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3, 1])
def test_inductor_multiplies_examples_of_unknown_lengths(longest: int):
    """It asks whether a size of a rectangle is 1, which a graph that reads the length from the data cannot know."""
    x = batch(longest, 0, 1, features=2).transpose(1, 2)
    x, w = NestedTensor(x.values, x.offsets, ragged_dim=2), torch.randn(3, 2, 2)
    got = torch.compile(torch.bmm, fullgraph=True)(w, x)
    assert got.shape == (3, 2, -1)
    torch.testing.assert_close(got.unbind(), [a @ b for a, b in zip(w, x.unbind(), strict=True)])
