"""TensorDicts with several batch dims and ragged leaves: examples by mask, place and gather, in and out of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from texts import Says, Texts, says
from torch import Tensor, nn

import tdc
from tdc import IndexingError, TensorDict

T = torch.tensor


def grid(padded: bool = False, lengths: tuple[int, ...] = (3, 2, 5)) -> tuple[TensorDict, list[list[Tensor]]]:
    """Two times as many examples, whose lengths follow the second batch dim."""
    g = torch.Generator().manual_seed(0)
    rows = [[torch.randn(n, 4, generator=g) for n in lengths] for _ in range(2)]
    xs: list[Any] = [tdc.pack(part) for part in rows]
    xs = [x.to_padded(float("nan"), length=6) for x in xs] if padded else xs
    size = [len(lengths)]
    return torch.stack([TensorDict({"t": x, "n": torch.arange(size[0])}, size) for x in xs]), rows


def same(x: Any, rows: list[Tensor], dim: int = 0) -> None:
    found = x.unbind(dim)
    assert len(found) == len(rows)
    assert all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_examples_of_several_batch_dims(padded: bool):
    td, rows = grid(padded)
    mask = T([[True, False, True], [False, True, True]])
    same(td[mask]["t"], [rows[i][j] for i, j in mask.nonzero().tolist()])
    same(td.masked_select(mask)["t"], [rows[i][j] for i, j in mask.nonzero().tolist()])
    same(td.permute(1, 0)[mask.t()]["t"], [rows[i][j] for j, i in mask.t().nonzero().tolist()])
    same(td[[1, 0, -1], [2, 1, -3]]["t"], [rows[1][2], rows[0][1], rows[1][0]])
    assert torch.equal(td[[1, 0, -1], [2, 1, -3]]["n"], T([2, 1, 0]))
    same(td["t"][[1, 0], [2, 1], ..., 1:], [rows[1][2][:, 1:], rows[0][1][:, 1:]])
    with pytest.raises(IndexingError, match=r"expected examples of \[2, 3\], got others"):
        td["t"][[0, 1], [0, 3]]


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_gather_of_examples(padded: bool):
    td, rows = grid(padded)
    got = td.gather(1, T([[2], [1]]))
    assert got.batch_size == (2, 1)
    same(got["t"][:, 0], [rows[0][2], rows[1][1]])
    same(td.gather(0, T([[1, 0]]))["t"][0], [rows[1][0], rows[0][1]])
    assert torch.equal(got["n"], T([[2], [1]]))


def test_rectangles_keep_their_batch_dims():
    td, rows = grid()
    m = td["t"].to_padded(float("nan"))
    assert (m.shape, m.batch_dim, m.ragged_dims) == ((2, 3, 5, 4), 1, (2,))
    for i in range(2):
        same(m[i], rows[i])
        same(m.to_packed()[i], rows[i])
    behind = td["t"].permute(2, 0, 3, 1).to_padded()
    assert (behind.shape, behind.batch_dim, behind.ragged_dims) == ((5, 2, 4, 3), 3, (0,))
    assert torch.equal(behind.to_packed().permute(1, 3, 0, 2).values, td["t"].values)


def test_the_only_example_is_a_tensor():
    for padded in (False, True):
        td, rows = grid(padded)
        for one in (td[:1, 1:2].squeeze(1), td[:, 1][:1]):
            assert one.batch_size == (1,)
        assert torch.equal(td[0, 1:2].squeeze(0)["t"], rows[0][1])
        assert torch.equal(td[1:, 2:].squeeze()["t"], rows[1][2])
        assert torch.equal(td[:, 1:2].squeeze(1)["t"], torch.stack([rows[0][1], rows[1][1]]))


@pytest.mark.slow
def test_one_graph_for_the_examples_that_are_named():
    def run(td: TensorDict, i: Tensor, j: Tensor) -> Any:
        return td[i, j]["t"].sum(1), td["t"].to_padded().data.sum()

    counter = Counter("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for lengths in ((3, 2, 5), (2, 4, 3, 1), (6, 2, 2, 4, 5)):
        td, rows = grid(lengths=lengths)
        picked, total = compiled(td, T([1, 0, 1]), T([2, 1, 0]))
        torch.testing.assert_close(picked, torch.stack([rows[i][j].sum(0) for i, j in ((1, 2), (0, 1), (1, 0))]))
        torch.testing.assert_close(total, td["t"].values.sum())
    assert counter.graphs == 2  # a TensorDict's batch size becomes dynamic with the second one


@pytest.mark.parametrize("length", [0, 1, 2])
def test_new_batch_dims_do_not_depend_on_how_long_padding_is(length: int):
    """A padded leaf whose longest row has one element is as wide as a batch dim of size 1."""
    x = tdc.pack([torch.randn(length) for _ in range(3)])
    td: Any = TensorDict({"packed": x, "padded": x.to_padded()}, [3])
    for made in (td.reshape(3, 1), td.view(1, 3, 1), td.reshape(3, 1).roll(1), td[:1].expand(2, 1).reshape(1, -1, 1)):
        ragged = [made[key].ragged_dims for key in ("packed", "padded")]
        assert ragged == [(made.ndim,)] * 2
        assert made["padded"].to_packed().tolist() == made["packed"].tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_batch_dims_behind_the_examples_become_one(padded: bool):
    td = grid(padded)[0].transpose(0, 1)
    for made in (td.reshape(-1), td.ravel(), td.flatten()):
        assert made.batch_size == (6,)
        assert all([torch.equal(made[i]["t"], td[i // 2, i % 2]["t"]) for i in range(6)])


@pytest.mark.parametrize("padded", [False, True])
def test_no_copies_of_ragged_examples_become_one_batch_dim(padded: bool):
    td = grid(padded)[0]
    for none in (td[:0], td[:0].transpose(0, 1)):
        for made in (none.flatten(), none.reshape(-1)):
            assert (made.batch_size, made["t"].shape[0], len(made["t"].lengths)) == ((0,), 0, 0)


SAYS: dict[str, Says] = {
    "batch dims regrouped": (lambda: grid()[0].reshape(3, 2), """\
ShapeError
tdc.reshape: expected dims of each example of NestedTensor float32[2, 3, -1, 4] regrouped, got sizes [3, 2, -1, 4]
hint: the batch stays, and ragged dims are one or side by side; or use x.to_padded().data"""),
    "examples in several dims": (lambda: grid()[0].gather(1, T([[2, 1], [1, 0]])), """\
ShapeError
tdc.gather: expected an index along one dim, of size 1 in the others, where leaves are ragged, got Tensor int64[2, 2]
hint: td[rows, columns] with two vectors, or td.apply(...) of padded leaves"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_rows_of_other_lengths_in_one_stack(self):
        x = tdc.pack([torch.ones(n, 4) for n in (3, 2)])
        self.says(lambda: torch.stack([TensorDict({"t": x}, [2]), TensorDict({"t": x[[1, 0]]}, [2])]), """\
StructureError
tdc.stack: expected operands of one ragged structure, got rows of different lengths
hint: torch.cat(xs) puts rows after rows, of other lengths as well""")  # fmt: skip

    def test_attention_over_several_batch_dims(self):
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.says(lambda: layer(grid()[0]["t"]), """\
StructureError
tdc.multi_head_attention_forward: expected (B, -1, D) or (-1, B, D), got 3 others
at operand 0: NestedTensor float32[2, 3, -1, 4]
at operand 1: NestedTensor float32[2, 3, -1, 4]
at operand 2: NestedTensor float32[2, 3, -1, 4]
hint: x.flatten(0, 1) makes static dims beside the batch part of it""")  # fmt: skip
