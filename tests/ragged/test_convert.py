"""Conversions: packed to padded and back, torch's jagged layout, values and gradients."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import refused

import tdc
from tdc import DtypeError, MaskedBatch, NestedTensor, ShapeError, StructureError, UnsupportedError
from tdc.compile import counted

T = torch.tensor
NAN = float("nan")
SHAPES: dict[str, tuple[list[tuple[int, ...]], Any]] = {
    "flat": ([(2,), (0,), (3,)], 1), "one position": ([(1,), (0,)], 1), "features": ([(2, 4), (0, 4), (3, 4)], 1),
    "second": ([(2, 2, 4), (2, 0, 4), (2, 3, 4)], 2), "two": ([(2, 3, 2), (0, 2, 2), (3, 1, 2)], (1, 2)),
    "two behind": ([(2, 2, 3), (2, 0, 2), (2, 3, 1)], (2, 3)), "three": ([(1, 2, 3), (2, 1, 1), (2, 0, 2)], (1, 2, 3)),
}  # fmt: skip


def batch(layout: str, **kwargs: Any) -> tuple[NestedTensor, list[Tensor]]:
    shapes, dims = SHAPES[layout]
    rows = [torch.randn(s, **kwargs) for s in shapes]
    return tdc.pack(rows, ragged_dim=dims), rows


@pytest.mark.parametrize("fill", [0.0, -1.0, NAN])
@pytest.mark.parametrize("layout", SHAPES)
def test_padding_holds_fill_and_rows_hold_values(layout: str, fill: float):
    x, rows = batch(layout)
    padded = x.to_padded(fill)
    assert isinstance(padded, MaskedBatch)
    assert padded.lengths.tolist() == x.sizes.tolist()
    assert padded.ragged_dims == x.ragged_dims
    longest = [max(r.shape[d] for r in rows) for d in range(rows[0].ndim)]
    want = torch.full((len(rows), *longest), fill)
    for i, row in enumerate(rows):
        want[(i, *[slice(n) for n in row.shape])] = row
    assert torch.equal(padded.data.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("layout", SHAPES)
def test_round_trip_with_nan_in_padding(layout: str):
    x, rows = batch(layout)
    padded = x.to_padded(NAN)
    for back in (padded.to_packed(), padded.to_packed(total=x.values.shape[x.structure.packed_dim])):
        assert torch.equal(back.values, x.values)
        assert torch.equal(back.offsets, x.offsets)
        assert [r.shape for r in back] == [r.shape for r in rows]
        assert back.max_length == padded.shape[padded.ragged_dims[0]]
        tdc.validate(back)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
def test_length_cuts_and_extends(length: int):
    x, rows = batch("features")
    cuts = length < x.max_length
    with pytest.warns(UserWarning, match="expected a length that holds the longest row") if cuts else nullcontext():
        padded = x.to_padded(9.0, length=length)
    assert tdc.truncate(x, length).to_padded(9.0, length=length).lengths.tolist() == padded.lengths.tolist()
    assert padded.shape == (3, length, 4)
    assert padded.lengths[:, 0].tolist() == [min(len(r), length) for r in rows]
    assert all(torch.equal(got, row[:length]) for got, row in zip(padded.unbind(), rows, strict=True))
    assert torch.equal(padded.filled(9.0), padded.data)


def test_length_of_several_ragged_dims():
    x, rows = batch("two behind")
    with pytest.warns(UserWarning, match=r"got \[2, 2\], so that it is cut"):
        padded = x.to_padded(length=(2, 2))
    assert padded.shape == (3, 2, 2, 2)
    assert all(torch.equal(got, row[:, :2, :2]) for got, row in zip(padded.unbind(), rows, strict=True))
    for wrong in (2, (2,), (2, 2, 2)):
        with pytest.raises(ShapeError, match="length with 2 sizes"):
            x.to_padded(length=wrong)


@pytest.mark.cases(3)
@pytest.mark.parametrize("layout", SHAPES)
def test_gradients_of_both_directions(layout: str):
    shapes, dims = SHAPES[layout]
    rows = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def there(*rows: Tensor) -> Tensor:
        return tdc.pack(rows, ragged_dim=dims).to_padded(2.0).data.sin()

    def there_and_back(*rows: Tensor) -> Tensor:
        return tdc.pack(rows, ragged_dim=dims).to_padded().to_packed().values.sin()

    for fn in (there, there_and_back):
        assert torch.autograd.gradcheck(fn, rows)
        assert torch.autograd.gradgradcheck(fn, rows)


def test_gradients_of_packing_leave_padding_alone():
    data, lengths = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True), T([2, 0, 4])

    def back(data: Tensor) -> Tensor:
        return MaskedBatch(data, lengths).to_packed().values.sin()

    assert torch.autograd.gradcheck(back, data)
    assert torch.autograd.gradgradcheck(back, data)
    (grad,) = torch.autograd.grad(back(data).sum(), data)
    mask = MaskedBatch(data, lengths).mask.expand_as(grad)
    assert torch.equal(grad[mask], data.cos()[mask])
    assert grad[~mask].eq(0).all()


@pytest.mark.filterwarnings("ignore:tdc.to_padded")
@pytest.mark.parametrize("length", [1, 2, 5])
def test_gradients_of_cut_rows(length: int):
    rows = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 0, 3)]
    assert torch.autograd.gradcheck(lambda *r: tdc.pack(r).to_padded(length=length).data ** 3, rows)
    assert torch.autograd.gradgradcheck(lambda *r: tdc.pack(r).to_padded(length=length).data ** 3, rows)
    images = [torch.randn(h, w, dtype=torch.float64, requires_grad=True) for h, w in ((2, 3), (3, 1), (1, 4))]
    assert torch.autograd.gradcheck(
        lambda *r: tdc.pack(r, ragged_dim=(1, 2)).to_padded(length=(2, length)).data ** 3, images
    )


@pytest.mark.parametrize("fill", [0, 7.0])
def test_integers_and_bools(fill: int):
    x = tdc.pack([T([1, 2]), T([3])])
    assert x.to_padded(fill).data.tolist() == [[1, 2], [3, fill]]
    assert x.to_padded().dtype == x.to_padded(fill).dtype == torch.int64
    y = tdc.pack([T([True, False]), T([True])])
    assert y.to_padded().dtype == y.to_padded(fill).dtype == torch.bool
    assert y.to_padded(bool(fill)).data.tolist() == [[True, False], [True, bool(fill)]]


def test_without_rows_or_elements():
    assert MaskedBatch(torch.zeros(2, 3), T([0, 0])).to_packed().shape == (2, -1)
    assert MaskedBatch(torch.zeros(2, 0), T([0, 0])).to_packed().tolist() == [[], []]
    assert MaskedBatch(torch.zeros(0, 3), T([], dtype=torch.int64)).to_packed().shape == (0, -1)
    rows = torch.zeros(0, 2, requires_grad=True)
    tdc.pack([rows]).to_padded(length=3).data.sum().backward()
    assert rows.grad is not None


# -- torch.nested


@pytest.mark.parametrize("layout", ["flat", "features", "second"])
def test_to_torch_and_back_copies_nothing(layout: str):
    x, rows = batch(layout)
    jagged = x.to_torch()
    assert jagged.is_nested
    assert jagged.layout == torch.jagged
    assert jagged.values().data_ptr() == x.values.data_ptr()
    assert jagged.offsets().data_ptr() == x.offsets.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(jagged.unbind(), rows, strict=True))
    back = tdc.from_torch(jagged)
    assert back.values.data_ptr() == x.values.data_ptr()
    assert back.offsets.data_ptr() == x.offsets.data_ptr()
    assert back.shape == x.shape
    assert torch.equal(jagged.to_padded_tensor(5.0), x.to_padded(5.0).data)


def test_gradients_flow_through_torch_nested():
    rows = [torch.randn(n, 2, requires_grad=True) for n in (2, 3)]
    out: Any = tdc.from_torch(tdc.pack(rows).to_torch() * 2)
    (out * out).sum().backward()
    assert all(torch.allclose(r.grad, 8 * r) for r in rows if r.grad is not None)
    assert all(r.grad is not None for r in rows)


def test_what_torch_nested_cannot_say():
    with pytest.raises(UnsupportedError, match="expected one ragged dim"):
        batch("two")[0].to_torch()
    with pytest.raises(UnsupportedError, match="got Tensor float32"):
        tdc.from_torch(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    with pytest.raises(UnsupportedError, match=r"layout torch\.jagged, got one of layout torch\.strided"):
        tdc.from_torch(strided)
    holes = torch.nested.narrow(torch.arange(12.0).view(2, 6), 1, T([0, 1]), T([2, 3]), layout=torch.jagged)
    assert tdc.from_torch(holes).tolist() == tdc.from_torch(holes.contiguous()).tolist() == [[0, 1], [7, 8, 9]]


# -- from_padded


def test_from_padded():
    data, lengths = torch.randn(3, 4, 2), T([2, 0, 4])
    mask = torch.arange(4) < lengths[:, None]
    for x in (tdc.from_padded(data, lengths=lengths), tdc.from_padded(data, mask=mask)):
        assert x.data is data
        assert x.lengths.tolist() == [[2], [0], [4]]
        assert torch.equal(x.mask[..., 0], mask)
        assert torch.equal(x.to_packed().values, data[mask])


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_from_padded_gives_padding_no_gradient(fill: float):
    """It was 0 times the derivative of what padding holds, and NaN in the weights of what made the rectangle."""
    right = torch.arange(3) < T([2, 0])[:, None]
    for f in (torch.sqrt, torch.log, torch.square, lambda x: x / x.norm(dim=2, keepdim=True)):
        for side, mask in (("right", right), ("left", right.flip(1))):
            data = torch.rand(2, 3, 4).masked_fill(~mask[..., None], fill).requires_grad_()
            (got,) = torch.autograd.grad(f(tdc.from_padded(data, mask=mask, side=side)).sum(), data)
            (want,) = torch.autograd.grad(f(data[mask].unsqueeze(0)).sum(), data)
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, ShapeError, "one of lengths= and mask=, got none"),
        ({"lengths": T([1, 2]), "mask": torch.ones(2, 3, dtype=torch.bool)}, ShapeError, "got both"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, ShapeError, r"a mask of \[2, 3\]"),
        ({"mask": torch.ones(2, 3, 1, dtype=torch.bool)}, ShapeError, r"a mask of \[2, 3\]"),
        ({"mask": torch.ones(2, 3)}, DtypeError, "a bool mask"),
        ({"mask": T([[False, True, True], [True, True, True]])}, StructureError, "padding behind each row"),
        ({"mask": T([[True, False, True], [True, True, True]])}, StructureError, "padding behind each row"),
        ({"lengths": T([1, 2], dtype=torch.int32)}, DtypeError, "int64 lengths"),
    ],
)
def test_from_padded_checks(given: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        tdc.from_padded(torch.zeros(2, 3), **given)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [[2, 9], [-1, 2]], ids=str)
def test_from_padded_refuses_lengths_outside_of_the_data(lengths: list[int], side: str):
    text = r"tdc\.from_padded: expected lengths between 0 and the width of data, got one outside\nhint: "
    with pytest.raises(StructureError, match=text):
        tdc.from_padded(torch.zeros(2, 3), lengths=T(lengths), side=side)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself, torch 2.13
def test_conversions_compile_to_one_graph():
    def fn(x: NestedTensor) -> Tensor:
        y = x.to_padded(NAN)
        return y.to_packed(total=x.values.shape[0]).values * 2

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for sizes in ((2, 0, 3), (1, 1, 7), (4, 5)):
        x = tdc.pack([torch.randn(n, 2) for n in sizes])
        with torch.compiler.set_stance("fail_on_recompile" if len(sizes) == 2 else "default"):
            assert torch.equal(compiled(x), x.values * 2)


@pytest.mark.parametrize("traced", [False, True])
def test_occupancy_is_the_share_of_real_elements(traced: bool):
    def known(*lengths: int) -> Any:
        return tdc.pack([torch.ones(n, 2) for n in lengths])

    def unknown(*lengths: int) -> Any:
        return NestedTensor(known(*lengths).values, known(*lengths).offsets)

    def images(*lengths: int) -> Any:
        return tdc.pack([torch.ones(n, n + 1) for n in lengths], ragged_dim=(1, 2))

    for make in (known, unknown, images, lambda *n: known(*n).to_padded(), lambda *n: images(*n).to_padded()):
        torch._dynamo.reset()
        fn = counted(lambda x: x.occupancy, backend="aot_eager")
        for lengths in ((3, 2), (4, 1, 7), (5, 5, 5, 2)):
            x = make(*lengths)
            mask = (x if isinstance(x, MaskedBatch) else x.to_padded()).mask
            share = fn(x) if traced else x.occupancy
            assert type(share) is float
            assert share == pytest.approx(mask.float().mean().item())
        assert not traced or (fn.counts.graphs, fn.counts.compiles) == (1, 1)


def test_occupancy_of_nothing_and_of_spare_room():
    nothing = tdc.pack([torch.ones(0, 2)])
    assert nothing.occupancy == nothing.to_padded().occupancy == nothing[:0].occupancy == 1.0
    spare = NestedTensor(torch.ones(3), torch.tensor([0, 1, 3]), max_length=6)
    assert spare.occupancy == spare.to_padded().occupancy == 3 / 12


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
def test_padding_of_every_dtype(dtype: torch.dtype):
    """torch has fewer operations for some."""
    x = tdc.NestedTensor(torch.tensor([[1], [0], [1], [1], [0]]).to(dtype), torch.tensor([0, 2, 2, 5]))
    with refused("not implemented", when=dtype == torch.uint16):
        padded = x.to_padded()
        assert padded.data.dtype == padded.to_packed().dtype == dtype
        assert padded.data.to(torch.complex64).real.squeeze(2).tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0]]
        assert padded.to_packed().values.to(torch.complex64).real.flatten().tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("kind", ["nested", "masked", "two levels"])
def test_in(kind: str):
    """A number is looked for among real elements, as in a tensor; anything else is refused."""
    x: Any = tdc.pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    x = {"nested": x, "masked": x.to_padded(7.0), "two levels": tdc.pack([x, x])}[kind]
    assert [n in x for n in (3.0, torch.tensor(1), 7.0)] == [True, True, False]
    with pytest.raises(tdc.DtypeError, match="expected a number, got str"):
        assert "3" in x
