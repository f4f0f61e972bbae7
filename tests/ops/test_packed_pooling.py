"""Pooling and transposed convolution of packed examples without a rectangle: values, derivatives, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import tdc
from tdc import NestedTensor, ShapeError, StructureError
from tdc.compile import counted, export
from tdc.core.linear_operators import linear
from tdc.ops.convolution import average, max_pool

F: Any = torch.nn.functional
DOUBLE = torch.float64
SIZES = ((7, 5, 3), (7, 5, 3), (3, 9, 4), (6, 6, 3), (9, 3, 5))  # neighbours of one size among them
SMALL = torch.tensor([[3, 2], [2, 4]])


def images(n: int, dtype: torch.dtype = DOUBLE, whole: bool = False) -> list[Tensor]:
    """Examples of 4 channels with n dims behind them; `whole` numbers, among which are equals."""
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, *size[:n], generator=g, dtype=dtype) for size in SIZES]
    return [part.round() for part in parts] if whole else parts


def packed(parts: list[Tensor]) -> NestedTensor:
    return tdc.pack(parts, ragged_dim=tuple(range(2, parts[0].ndim + 1)))


def agree(
    fn: Callable[..., Any], parts: list[Tensor], ragged: tuple[int, ...], others: tuple[Tensor, ...] = ()
) -> None:  # fmt: skip
    """All results of a batch, and the gradients of the first, are those of one example after another; nothing is
    padded."""
    leaves = [t.detach().requires_grad_() for t in (*parts, *others)]
    rows, rest = leaves[: len(parts)], leaves[len(parts) :]
    with tdc.testing.forbid(padding=True):
        found = fn(tdc.pack(rows, ragged_dim=ragged), *rest)
    wanted = [fn(row.unsqueeze(0), *rest) for row in rows]
    several = isinstance(found, tuple)
    ours = [list(t.unbind()) for t in (found if several else (found,))]
    theirs = [[t[0] for t in ts] for ts in (zip(*wanted, strict=True) if several else (wanted,))]
    torch.testing.assert_close(ours, theirs)
    weights = [torch.randn_like(y) for y in theirs[0]]
    grads = []
    for results in (ours[0], theirs[0]):
        total = torch.stack([(y * w).sum() for y, w in zip(results, weights, strict=True)]).sum()
        grads.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*grads)


AVERAGES: list[dict[str, Any]] = [
    {}, {"stride": 2, "padding": 1}, {"stride": 1, "ceil_mode": True},
    {"stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
]  # fmt: skip


@pytest.mark.parametrize("options", AVERAGES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_averages_and_norms_of_windows(n: int, options: dict[str, Any]):
    ragged = packed(images(n)).ragged_dims
    agree(lambda x: getattr(F, f"avg_pool{n}d")(x, 3, **options), images(n), ragged)
    agree(lambda x: getattr(F, f"lp_pool{n}d")(x.abs() + 1, 3, 2), images(n), ragged)


def test_a_divisor():
    agree(lambda x: F.avg_pool2d(x, 2, divisor_override=3), images(2), (2, 3))


@pytest.mark.parametrize("bins", [1, 2, 7, (1, 3), (None, 2), (None, None)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_adaptive_bins(n: int, bins: Any):
    """Fewer than positions, and more of them."""
    if n == 1 and isinstance(bins, tuple):
        bins = 5
    wanted = bins if isinstance(bins, int) else (*bins, 2)[:n]
    ragged = packed(images(n)).ragged_dims
    agree(lambda x: getattr(F, f"adaptive_avg_pool{n}d")(x, wanted), images(n), ragged)
    agree(lambda x: getattr(F, f"adaptive_max_pool{n}d")(x, wanted, return_indices=True), images(n), ragged)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_indices_go_back(n: int):
    """Through max_unpool, whose results are as large as windows without overlap make them."""
    pool, unpool = getattr(F, f"max_pool{n}d"), getattr(F, f"max_unpool{n}d")
    parts = [part.repeat_interleave(2, -1) for part in images(n)]
    kernel, ragged = [*(1,) * (n - 1), 2], packed(parts).ragged_dims
    agree(lambda x: pool(x, 2, 1, return_indices=True), parts, ragged)
    agree(lambda x: unpool(*pool(x, kernel, return_indices=True), kernel), parts, ragged)


OPTIONS: list[tuple[int, dict[str, Any]]] = [  # kernel, options
    (3, {}), (2, {"stride": 2}), (3, {"stride": 2, "padding": 1, "output_padding": 1}),
    (2, {"groups": 2, "stride": 3}), (2, {"dilation": 2, "padding": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_transposed_convolution(n: int, kernel: int, options: dict[str, Any]):
    weight = torch.randn(4, 6 // options.get("groups", 1), *[kernel] * n, dtype=DOUBLE)
    bias, ragged = torch.randn(6, dtype=DOUBLE), packed(images(n)).ragged_dims
    agree(lambda x, w, b: getattr(F, f"conv_transpose{n}d")(x, w, b, **options), images(n), ragged, (weight, bias))


def test_output_padding_of_another_window():
    """torch takes it below the dilation; a convolution of such a result has more positions, so this pads."""
    x, weight = packed(images(2)), torch.randn(4, 3, 2, 2, dtype=DOUBLE)
    out = F.conv_transpose2d(x, weight, None, 1, 1, 1, 1, 2)
    want = [F.conv_transpose2d(row[None], weight, None, 1, 1, 1, 1, 2)[0] for row in x.unbind()]
    torch.testing.assert_close(list(out.unbind()), want)


CALLS: list[Callable[[Any], Any]] = [
    lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.adaptive_max_pool2d(x, (2, 3)), lambda x: F.avg_pool2d(x, 2),
    lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    lambda x: F.conv_transpose2d(x, torch.arange(72, dtype=DOUBLE).view(4, 3, 2, 3), stride=(1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("ragged", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_static_dim_beside_a_ragged_one(call: Callable[[Any], Any], ragged: int):
    """Among equal numbers the first one gets the gradient, in the order in which an example has them."""
    parts = [part[:, :, :3] if ragged == 2 else part[:, :3] for part in images(2, whole=True)]
    agree(call, parts, (ragged,))


@pytest.mark.parametrize("ragged", [(2, 3), (3,)])
def test_windows_of_padding_alone(ragged: tuple[int, ...]):
    """Where a window has no element, torch finds minus infinity at a position outside: here no other example has it."""
    parts = [torch.randn(4, 3, n, dtype=DOUBLE, requires_grad=True) for n in (1, 4, 1)]
    pool = lambda x: F.max_pool2d(x, 2, 1, 1, (1, 2))  # noqa: E731  # one line for both
    out = pool(tdc.pack(parts, ragged_dim=ragged))
    want = [pool(part[None])[0] for part in parts]
    torch.testing.assert_close(list(out.unbind()), want)
    assert want[0].isinf().all()
    (ours,) = torch.autograd.grad(out.unbind()[1].sum(), parts[1], retain_graph=True)
    (theirs,) = torch.autograd.grad(want[1].sum(), parts[1])
    torch.testing.assert_close(ours, theirs)
    others = torch.autograd.grad(out.unbind()[0].sum(), parts, allow_unused=True, materialize_grads=True)
    assert [x.sum() for x in others] == [want[0].numel(), 0, 0]


@pytest.mark.parametrize("op", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_a_ragged_dim_behind_bins(op: Any):
    """It is not the first dim of the rows of a result, so this pads."""
    x = packed(images(2))
    want = [op(row[None], (2, None))[0] for row in x.unbind()]
    torch.testing.assert_close(list(op(x, (2, None)).unbind()), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_single_and_half_precision(dtype: torch.dtype):
    """One bin of many positions and of few; sums are carried wide."""
    g = torch.Generator().manual_seed(0)
    large = [torch.rand(3, h, w, generator=g).to(dtype) for h, w in ((90, 80), (70, 61))]
    for parts in (images(2, dtype), large):
        for call in (lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.avg_pool2d(x, 3, 2, 1)):
            want = [call(part.double()[None])[0].to(dtype) for part in parts]
            close: Any = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(list(call(packed(parts)).unbind()), want, **close)


def test_nan_and_infinity_stay_with_their_bins():
    parts = images(2)
    parts[1][0, 3, 2], parts[3][1, 2, 2] = float("nan"), float("inf")
    for op in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        for bins in (1, 3):
            want = [op(part[None], bins)[0] for part in parts]
            torch.testing.assert_close(list(op(packed(parts), bins).unbind()), want, equal_nan=True)


WINDOWS = [2, 2], [1, 2], [0, 0], False, True, None  # kernel, stride, padding, ceil_mode, count_include_pad, divisor
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool": lambda x: average.avg_pool(x, SMALL, 4, *WINDOWS),
    "avg_pool_backward": lambda x: linear(average.rows_backward, x[:4], SMALL, 14, *WINDOWS),
    "adaptive_avg": lambda x: average.adaptive_avg(x, SMALL, 4, [2, 1]),
    "one bin": lambda x: average.adaptive_avg(x, SMALL, 2, [1, 1]),
    "adaptive_max": lambda x: max_pool.adaptive_max(x, SMALL, 4, [0, 1], [2, 1])[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives(way: str):
    """Backwards, in a direction, twice, and forward over reverse."""
    x = torch.randn(14, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(WAYS[way], x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: WAYS[way](x).pow(3), x, check_fwd_over_rev=True)


@pytest.mark.parametrize("way", WAYS)
def test_members(way: str):
    """vmap, and gradients inside and outside of it: each member by itself."""
    fn, x = WAYS[way], torch.randn(14, 3, 2, dtype=DOUBLE)
    slope = torch.func.grad(lambda x: fn(x).pow(2).sum())
    want = torch.stack([slope(m) for m in x.unbind(1)])
    torch.testing.assert_close(torch.vmap(fn, 1)(x), torch.stack([fn(m) for m in x.unbind(1)]))
    torch.testing.assert_close(torch.vmap(slope, 1)(x), want)
    whole = torch.func.grad(lambda x: torch.vmap(fn, 1)(x).pow(2).sum())(x)
    torch.testing.assert_close(whole, want.transpose(0, 1))


def test_members_share_sizes():
    x = torch.randn(14, 2)
    for op in (average.adaptive_rows, lambda *args: max_pool.adaptive_rows(*args[:3], [0, 1], *args[3:])):
        with pytest.raises(StructureError, match="expected one ragged structure for all members"):
            torch.vmap(lambda s, op=op: op(x, s, 4, [2, 1]))(SMALL[None])


def test_positions_that_are_not_those_of_the_sizes():
    x = torch.randn(13, 2)
    with pytest.raises(StructureError, match=r"tdc\.avg_pool: expected as many positions as its sizes have"):
        WAYS["avg_pool"](x)
    with pytest.raises(StructureError, match=r"tdc\.adaptive_avg_pool: expected as many positions as its sizes have"):
        WAYS["one bin"](x)
    with pytest.raises(StructureError, match=r"tdc\.adaptive_max_pool: expected as many positions as its sizes have"):
        WAYS["adaptive_max"](x)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.AvgPool2d(2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, 2),
        nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d((None, 3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def sized(*sizes: tuple[int, int]) -> NestedTensor:
    return tdc.pack([torch.randn(4, *size) for size in sizes], ragged_dim=(2, 3))


@pytest.mark.slow
def test_one_graph_for_all_sizes():
    net = network()
    step = counted(net, backend="aot_eager", fullgraph=True)
    for sizes in (((7, 5), (7, 5), (3, 9)), ((8, 4), (3, 3)), ((5, 5), (12, 4), (5, 6), (4, 3))):
        x = sized(*sizes)
        x = x.with_values(x.values.detach().requires_grad_())
        leaves = [x.values, *net.parameters()]
        out, want = step(x), torch.cat([net(row[None]) for row in x.unbind()])
        torch.testing.assert_close(out, want)
        ours, theirs = [torch.autograd.grad(y.square().sum(), leaves) for y in (out, want)]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


@pytest.mark.slow
def test_nodes_of_a_graph():
    """One for each operation, and none that pads."""
    graphs: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    net = network().requires_grad_(False)
    torch.compile(net, backend=aot_autograd(fw_compiler=note), fullgraph=True)(packed(images(2, torch.float32)))
    names = [str(node.target) for node in graphs[0].graph.nodes]
    counts = {name: names.count(f"tdc.{name}.default") for name in ("conv_rows", "conv_rows_input", "avg_pool_rows")}
    assert counts == {"conv_rows": 1, "conv_rows_input": 1, "avg_pool_rows": 2}
    assert names.count("tdc.adaptive_max_rows.default") == names.count("tdc.adaptive_avg_rows.default") == 1
    assert not [name for name in names if "aten.index" in name or ("pool" in name and "aten" in name)]


def unpooled(x: Any) -> Any:
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


@pytest.mark.slow
def test_indices_in_a_graph():
    step = counted(unpooled, backend="aot_eager", fullgraph=True)
    for sizes in (((4, 6), (2, 8)), ((6, 6), (2, 2), (8, 4))):
        x = sized(*sizes)
        torch.testing.assert_close(list(step(x).unbind()), [unpooled(row[None])[0] for row in x.unbind()])
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_indices_of_members():
    x = sized((4, 6), (2, 8))
    values = torch.randn(3, *x.values.shape)
    found = torch.vmap(lambda v: unpooled(x.with_values(v)).values)(values)
    torch.testing.assert_close(found, torch.stack([unpooled(x.with_values(v)).values for v in values]))


@pytest.mark.sweep
def test_exported():
    """Of torch's own operations, which need no Python."""
    net = network()
    made = export(net, (sized((7, 5), (4, 9)),), dynamic={"input": {"batch": ("B", 0, 8)}})
    assert "_rows" not in str(made.program.graph)
    for sizes in (((7, 5), (4, 9)), ((3, 8), (8, 3), (6, 6))):
        x = sized(*sizes)
        torch.testing.assert_close(made(x), torch.cat([net(row[None]) for row in x.unbind()]))


def test_autocast():
    x, net = packed(images(2, torch.float32)), network()
    with torch.autocast("cpu", torch.bfloat16):
        out, want = net(x), torch.cat([net(row[None]) for row in x.unbind()])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=5e-2, atol=5e-2)


def twice(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda t: torch.func.grad(loss)(t).square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("op", [F.adaptive_max_pool2d, F.adaptive_avg_pool2d, F.avg_pool2d])
def test_second_derivative_in_a_graph(op: Any):
    x = packed(images(2))

    def values(v: Tensor) -> Tensor:
        out = op(x.with_values(v), 2)
        return out if isinstance(out, Tensor) else out.values

    fn = twice(lambda v: values(v).pow(3).sum())
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager", fullgraph=True)(x.values), fn(x.values))


def test_second_derivative_of_the_operator_in_a_graph():
    fn, x = twice(lambda v: WAYS["one bin"](v).pow(3).sum()), torch.randn(14, 2, dtype=DOUBLE)
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager", fullgraph=True)(x), fn(x))


def test_what_torch_refuses_goes_to_torch():
    x = packed(images(2))
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        F.avg_pool2d(x, 2, 1, 2)
    with pytest.raises(ShapeError, match="expected 5 channels, got 4"):
        F.conv_transpose2d(x, torch.randn(5, 3, 2, 2, dtype=DOUBLE))
