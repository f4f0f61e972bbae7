"""Pooling and transposed convolution of packed examples: values, derivatives, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, ShapeError
from tdc.compile import counted, export

F: Any = torch.nn.functional
DOUBLE = torch.float64
SIZES = ((7, 5, 3), (7, 5, 3), (3, 9, 4), (6, 6, 3), (9, 3, 5))  # neighbours of one size among them


def images(n: int, dtype: torch.dtype = DOUBLE, whole: bool = False) -> list[Tensor]:
    """Examples of 4 channels with n dims behind them; `whole` numbers, among which are equals."""
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, *size[:n], generator=g, dtype=dtype) for size in SIZES]
    return [part.round() for part in parts] if whole else parts


def packed(parts: list[Tensor]) -> NestedTensor:
    return tdc.pack(parts, ragged_dim=tuple(range(2, parts[0].ndim + 1)))


def agree(
    fn: Callable[..., Any], parts: list[Tensor], ragged: tuple[int, ...], others: tuple[Tensor, ...] = (),
    padding: bool = True,
) -> None:  # fmt: skip
    """All results of a batch, and the gradients of the first, are those of one example after another.

    Args:
        padding: allowed on the way.
    """
    leaves = [t.detach().requires_grad_() for t in (*parts, *others)]
    rows, rest = leaves[: len(parts)], leaves[len(parts) :]
    with tdc.testing.forbid(padding=not padding):
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


OPTIONS: list[tuple[int, dict[str, Any]]] = [  # kernel, options
    (3, {}), (2, {"stride": 2}), (3, {"stride": 2, "padding": 1, "output_padding": 1}),
    (2, {"groups": 2, "stride": 3}), (2, {"dilation": 2, "padding": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_transposed_convolution(n: int, kernel: int, options: dict[str, Any]):
    weight = torch.randn(4, 6 // options.get("groups", 1), *[kernel] * n, dtype=DOUBLE)
    bias, ragged = torch.randn(6, dtype=DOUBLE), packed(images(n)).ragged_dims
    op = getattr(F, f"conv_transpose{n}d")
    agree(lambda x, w, b: op(x, w, b, **options), images(n), ragged, (weight, bias), padding=False)


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
    """Where a window has no element, torch finds minus infinity; no other example gets its gradient."""
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
    assert [x.sum() for x in others[1:]] == [0, 0]


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


@pytest.mark.sweep
def test_exported():
    """Of torch's own operations, which need no Python."""
    net = network()
    made = export(net, (sized((7, 5), (4, 9)),), dynamic={"input": {"batch": ("B", 0, 8)}})
    assert "_rows" not in str(made.program.graph)
    for sizes in (((7, 5), (4, 9)), ((3, 8), (8, 3), (6, 6))):
        x = sized(*sizes)
        torch.testing.assert_close(made(x), torch.cat([net(row[None]) for row in x.unbind()]))


def test_what_torch_refuses_goes_to_torch():
    x = packed(images(2))
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        F.avg_pool2d(x, 2, 1, 2)
    with pytest.raises(ShapeError, match="expected padding of at most half a kernel of 2 x 2, got \\(2, 2\\)"):
        F.max_pool2d(x, 2, 1, 2)
    with pytest.raises(ShapeError, match="expected 5 channels, got 4"):
        F.conv_transpose2d(x, torch.randn(5, 3, 2, 2, dtype=DOUBLE))


@pytest.mark.sweep
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_windows_behind_a_small_example_in_compiled_code(n: int):
    """They hold padding alone, and have no gradient."""
    parts = [torch.randn(2, *[side] * n) for side in (3, 40)]
    x = tdc.pack(parts, ragged_dim=tuple(range(2, n + 2)))
    pool = getattr(F, f"max_pool{n}d")

    def pooled(values: Tensor) -> Tensor:
        return pool(x.with_values(values).sin(), 3, 2, 1).values.square().sum()

    values = x.values.detach().requires_grad_()
    compiled = torch.compile(pooled, fullgraph=True)
    ours, theirs = [torch.autograd.grad(fn(values), values)[0] for fn in (compiled, pooled)]
    torch.testing.assert_close(ours, theirs)
