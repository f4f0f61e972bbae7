"""flatten and unflatten of ragged dims: images as sequences of positions and back; what the matrix has no sample of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor, nn
from torch.testing import assert_close

import tdc

SIZES = ((4, 5), (2, 7), (1, 1))


def images(*sizes: tuple[int, int], channels: int = 3, dtype: Any = torch.float32) -> tdc.NestedTensor:
    rows = [(torch.randn(channels, *n) * 4).to(dtype) for n in sizes or SIZES]
    return tdc.pack(rows, ragged_dim=(2, 3))


def both(x: tdc.NestedTensor) -> tuple[Any, Any]:
    """Packed, and padded with what must not be read."""
    return x, x.to_padded(float("nan")) if x.dtype.is_floating_point else x.to_padded(1)


def same(x: Any, rows: list[Tensor]) -> None:
    assert_close(x.unbind(), rows)


class Patches(nn.Module):
    """The patch embedding of a vision transformer, a layer, and the way back to the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.layer = nn.Conv2d(3, 8, 2, 2), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        grid = self.proj(x)
        tokens = self.layer(grid.flatten(2).transpose(1, 2))
        return tokens.transpose(1, 2).unflatten(2, grid.shape[2:] if isinstance(grid, Tensor) else grid)


class TestPatchEmbedding:
    def test_equals_each_image_alone(self):
        torch.manual_seed(0)
        net, x = Patches(), images((4, 6), (2, 8), (7, 3))
        alone = [net(row[None])[0] for row in x.unbind()]
        want = torch.autograd.grad(sum(y.square().sum() for y in alone), list(net.parameters()))
        for batch in both(x):
            out = net(batch)
            same(out, alone)
            loss = sum(y.square().sum() for y in out.unbind())
            assert_close(torch.autograd.grad(loss, list(net.parameters())), want, atol=2e-4, rtol=2e-4)

    @pytest.mark.sweep
    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("kind", [0, 1])
    def test_one_graph_for_all_sizes(self, kind: int):
        net, counter = Patches().eval(), Counter()
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        for sizes in (((4, 6), (2, 8)), ((8, 8), (3, 5), (2, 2)), ((6, 4), (9, 2))):
            x = images(*sizes)
            same(compiled(both(x)[kind]), [net(row[None])[0] for row in x.unbind()])
        assert counter.graphs == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_dtypes_stay(dtype: torch.dtype):
    x = images(dtype=dtype)
    for batch in both(x):
        flat = batch.flatten(2)
        for y in (flat, batch.flatten(1), batch.flatten(1).unflatten(1, (3, -1)), flat.unflatten(2, batch)):
            assert y.dtype == dtype
        same(batch.flatten(1).unflatten(1, (3, -1)), [row.flatten(1) for row in x.unbind()])


def test_structures_are_shared():
    x = images()
    assert x.flatten(2).offsets is x.offsets
    y = x.flatten(2).transpose(1, 2).unflatten(1, x)
    assert y.offsets is x.offsets
    assert y.shape == (3, -1, -1, 3)


def test_a_bound_of_lengths_stays_a_bound():
    x = images()
    assert x.flatten(2).max_length == 4 * 7
    assert x.flatten(2).unflatten(2, (-1, 1)).max_length == 4 * 7


@pytest.mark.parametrize("kind", [0, 1])
def test_tensors_of_sizes(kind: int):
    x = images()
    batch = both(x)[kind]
    y = batch.flatten(2).unflatten(2, torch.tensor(SIZES))
    same(y, list(x.unbind()))
    assert y.shape == batch.shape


@pytest.mark.parametrize("kind", [0, 1])
def test_the_batch_between_other_dims(kind: int):
    x = images()
    moved = both(x)[kind].permute(1, 2, 3, 0)  # (C, -1, -1, B)
    flat = moved.flatten(1, 2)
    assert flat.ndim == 3
    same(flat.permute(2, 0, 1), [row.flatten(1) for row in x.unbind()])
    same(flat.unflatten(1, moved).permute(3, 0, 1, 2), list(x.unbind()))
    lines = moved.flatten(0, 1)  # (-1, -1, B)
    same(lines.permute(2, 0, 1), [row.flatten(0, 1) for row in x.unbind()])


@pytest.mark.parametrize("sizes", [((0, 3), (2, 0)), ((0, 0),), ((0, 2), (3, 1))])
@pytest.mark.parametrize("kind", [0, 1])
def test_images_without_positions(sizes: Any, kind: int):
    x = images(*sizes)
    batch = both(x)[kind]
    same(batch.flatten(1), [row.flatten() for row in x.unbind()])
    same(batch.flatten(2).unflatten(2, batch), list(x.unbind()))


RESHAPES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "positions": (lambda x: x.reshape(x.shape[0], x.shape[1], -1), lambda r: r.flatten(1)),
    "positions, by view": (lambda x: x.view(x.size(0), 3, -1), lambda r: r.flatten(1)),
    "whole images": (lambda x: x.reshape(len(x), -1), lambda r: r.flatten()),
    "channels mixed": (lambda x: x.reshape(-1, -1, 3), lambda r: r.reshape(-1, 3)),
    "channels mixed, ragged last": (lambda x: x.reshape(3, 3, 1, -1), lambda r: r.flatten(1)[:, None]),
    "as it is": (lambda x: x.reshape(-1, 3, -1, -1), lambda r: r),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshape_of_packed_images_means_the_same(name: str):
    fn, row = RESHAPES[name]
    x = images()
    same(fn(x), [row(r) for r in x.unbind()])


@pytest.mark.parametrize("sizes", [(3, 3, -1), (3, -1), (-1, 3, 4 * 7), (3, -1, 7), (3, -1, 4 * 7)])
def test_reshape_by_sizes_of_a_rectangle_is_refused(sizes: tuple[int, ...]):
    with pytest.raises(tdc.ShapeError, match=r"x.flatten\(2, 3\)"):
        images().to_padded().reshape(sizes)


def test_reshape_where_the_longest_row_has_the_size_of_a_static_dim():
    """-1 is the ragged dim, where it may be."""
    one = tdc.pack([torch.arange(4.0).view(1, 4) + i for i in range(3)]).to_padded()
    assert one.reshape(3, 1, -1, 4).ragged_dims == one.reshape(-1, 1, -1, 2, 2).ragged_dims == (2,)
    assert one.reshape(3, 1, 4).ragged_dims == one.reshape(3, 1, 1, 4).ragged_dims == (1,)
    assert one.reshape(3, one.shape[1], -1).ragged_dims == one.reshape(-1, -1, 4).ragged_dims == (1,)
    single = tdc.pack([torch.ones(1, 1)]).to_padded()
    assert single.reshape(1, -1, 1).ragged_dims == (1,)


def test_reshape_of_static_dims_in_front_of_ragged_ones():
    x = images(channels=8)
    for batch, ragged in ((x, (-1, -1)), (x.to_padded(), (4, 7))):
        y = batch.reshape(-1, -1, 2, *ragged)
        assert y.ndim == 5
        same(y, [row.unflatten(0, (4, 2)) for row in x.unbind()])


def test_position_embeddings_for_each_grid():
    x, table = images(), torch.randn(1, 3, 4, 4, requires_grad=True)
    tables = tdc.pack([table[0]] * len(x), ragged_dim=(2, 3))
    out = x + F.interpolate(tables, size=x, mode="bicubic")
    want = [r + F.interpolate(table, size=r.shape[1:], mode="bicubic")[0] for r in x.unbind()]
    same(out, want)
    got, expected = [torch.autograd.grad(sum(y.square().sum() for y in ys), table)[0] for ys in (out.unbind(), want)]
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the batch": (lambda x: x.flatten(), "with the batch"),
    "positions of all": (lambda x: x.reshape(-1, 3), "sizes"),
    "two sizes to find": (lambda x: x.flatten(2).unflatten(2, (-1, -1)), "one -1"),
    "no ragged size": (lambda x: x.flatten(2).unflatten(2, (2, 2)), "one -1"),
    "a number that does not divide": (lambda x: x.flatten(2).unflatten(2, (-1, 4)), "lengths that 4 divides"),
    "one of two ragged dims": (lambda x: x.unflatten(3, (-1, 1)), "one of several ragged dims"),
    "a batch of one ragged dim": (lambda x: x.flatten(2).unflatten(2, x.flatten(2)), "several ragged dims"),
    "sizes of others": (lambda x: x.flatten(2).unflatten(2, torch.tensor(SIZES[::-1])), "multiply to the lengths"),
    "sizes that are no int64": (lambda x: x.flatten(2).unflatten(2, torch.tensor(SIZES).int()), "int64"),
    "area": (lambda x: F.interpolate(x, size=x, mode="area"), "'area'"),
    "sizes of a packed shape": (lambda x: F.interpolate(x, size=images().shape[2:]), "size=y, for the sizes"),
    "sizes of other rows": (lambda x: F.interpolate(x, size=x[:1]), "sizes of a batch like"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", [0, 1])
def test_refused(name: str, kind: int):
    call, text = REFUSED[name]
    with pytest.raises(tdc.TdcError, match=text):
        call(both(images())[kind])


@pytest.mark.parametrize("kind", [0, 1])
def test_the_other_container_gives_no_sizes(kind: int):
    x, other = both(images())[:: 1 - 2 * kind]
    with pytest.raises(tdc.StructureError, match="convert"):
        x.flatten(2).unflatten(2, other)
