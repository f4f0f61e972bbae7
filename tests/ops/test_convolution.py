"""Convolution of packed examples without a rectangle: both ways of the kernel, derivatives, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from versions import refused

import tdc
from tdc import NestedTensor, ShapeError, StructureError
from tdc.compile import counted, export
from tdc.kernels import convolution_cpu as cpu
from tdc.kernels.convolution import convolve

F: Any = torch.nn.functional
CONV: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SIZES = ((7, 5), (7, 5), (3, 9), (6, 6), (9, 3))  # neighbours of one size among them
DOUBLE = torch.float64
OPTIONS: list[tuple[int, Any, dict[str, Any]]] = [  # dims, kernel, options
    (1, (3,), {"padding": 1}),
    (1, (2,), {"stride": 3, "dilation": 2}),
    (1, (2,), {}),
    (1, (3,), {"padding": 4, "dilation": 2, "groups": 2}),
    (1, (2,), {"groups": 2}),
    (1, (2,), {"padding": 3}),  # more than a window reads
    (2, (3, 3), {"stride": 2, "padding": 1}),
    (2, (1, 1), {}),
    (2, (1, 1), {"stride": 2}),
    (2, (3, 2), {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)}),
    (2, (3, 3), {"padding": "same", "groups": 2}),
    (2, (3, 1), {"padding": "same", "dilation": 2}),
    (2, (2, 3), {"padding": "valid", "groups": 4}),
    (2, (2, 2), {"padding": "same"}),  # more padding on one side: on the rectangle
    (3, (2, 3, 1), {"padding": (1, 0, 1), "stride": (2, 1, 2)}),
    (3, (3, 2, 2), {"dilation": (1, 2, 1), "groups": 2}),
]


@pytest.fixture(params=["gathered", "by example"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two ways of the kernel, where groups leave a choice."""
    all_at_once = request.param == "gathered"
    monkeypatch.setattr(cpu, "gathers", lambda found, total, channels, w, wide=0: w.groups == 1 and all_at_once)
    return request.param


def images(n: int, channels: int = 4, dtype: torch.dtype = DOUBLE, seed: int = 0) -> list[Tensor]:
    """Examples with n dims behind their channels, of which the first of three is the same for all."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(channels, *(4,) * (n - 2), *size[:n], generator=g, dtype=dtype) for size in SIZES]


def packed(parts: list[Tensor]) -> NestedTensor:
    n = parts[0].ndim - 1
    return tdc.pack(parts, ragged_dim=tuple(range(max(2, n), n + 2)))


def agree(fn: Callable[..., Any], parts: list[Tensor], others: list[Tensor]) -> None:
    """Results of a batch and all gradients are those of one example after another."""
    leaves = [t.detach().requires_grad_() for t in (*parts, *others)]
    rows, rest = leaves[: len(parts)], leaves[len(parts) :]
    ours, theirs = list(fn(packed(rows), *rest).unbind()), [fn(row.unsqueeze(0), *rest)[0] for row in rows]
    torch.testing.assert_close(ours, theirs)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype) for y in theirs]
    grads = []
    for found in (ours, theirs):
        total = torch.stack([(y * w).sum() for y, w in zip(found, weights, strict=True)]).sum()
        grads.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("n", "kernel", "options"), OPTIONS, ids=str)
def test_values_and_gradients(way: str, n: int, kernel: tuple[int, ...], options: dict[str, Any]):
    weight = torch.randn(8, 4 // options.get("groups", 1), *kernel, dtype=DOUBLE)
    agree(partial(convolution, n, options), images(n), [weight, torch.randn(8, dtype=DOUBLE)])


def convolution(n: int, options: dict[str, Any], x: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    return CONV[n](x, weight, bias, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_goes_through_onednn(way: str, dtype: torch.dtype):
    """Planes with channels innermost, in the dtypes that it has kernels for; sums over examples are carried wide."""
    weight = torch.randn(8, 4, 3, 3, dtype=dtype)
    parts = images(2, dtype=dtype)
    x = packed([p.requires_grad_() for p in parts])
    out = F.conv2d(x, weight.requires_grad_(), padding=1)
    want = [F.conv2d(p.double()[None], weight.double(), padding=1)[0] for p in parts]
    close: Any = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}[dtype]
    torch.testing.assert_close([o.double() for o in out.unbind()], want, **close)
    ours = torch.autograd.grad(out.values.sum(), [weight, *parts])
    theirs = torch.autograd.grad(torch.stack([y.sum() for y in want]).sum(), [weight, *parts])
    torch.testing.assert_close(ours, theirs, rtol=close["rtol"], atol=10 * close["atol"])


@pytest.mark.parametrize("n", [2, 3])
def test_results_of_one_channel_that_are_one_wide(n: int):
    """oneDNN leaves memory as it was where neighbours of one size have their channel innermost (torch 2.13)."""
    parts = [torch.randn(1, *(14, 14, 3)[-n:], dtype=torch.float32) for _ in range(3)]
    weight = torch.randn(4, 1, *[3] * n, dtype=torch.float32)
    for kernel in (weight, weight.movedim(1, -1).contiguous().movedim(-1, 1)):
        x = CONV[n](packed(parts), torch.ones(1, 1, *[1] * n, dtype=torch.float32))  # the same, channels innermost
        out = CONV[n](x, kernel, stride=(1, 1, 4)[-n:])
        for a, b in zip(out.unbind(), parts, strict=True):
            torch.testing.assert_close(a, CONV[n](b[None], weight, stride=(1, 1, 4)[-n:])[0], rtol=1e-4, atol=1e-4)


def test_kernels_of_one_position_are_not_dilated():
    """For a dilation of one position, which says nothing, oneDNN reads elsewhere (torch 2.13)."""
    windows = cpu.Windows((3, 1), (1, 2), (0, 1), (2, 2), 4).flat
    assert (windows.dilation, windows.of((9, 1))) == ((2, 1), [5, 2])
    assert cpu.Windows((1,), (2,), (0,), (3,)).flat.dilation == (1, 1)


def test_neighbours_of_one_size_are_one_batch():
    x = packed(images(2))
    windows = cpu.Windows((3, 3), (1, 1), (1, 1), (1, 1))
    total = x.values.shape[1]
    found = cpu.runs(x.sizes, windows, total, total)
    assert [run.planes for run in found] == [(2, 7, 5), (1, 3, 9), (1, 6, 6), (1, 9, 3)]


def test_the_way_follows_from_sizes():
    """Large planes one by one; small ones, and kernels of one position, in one product."""
    one, three = [cpu.Windows((k, k), (1, 1), (0, 0), (1, 1)) for k in (1, 3)]
    for side, windows, gathered in ((4, three, True), (100, three, False), (100, one, True)):
        n = side - windows.kernel[0] + 1
        found = cpu.runs(torch.tensor([[side, side]]), windows, side * side, n * n)
        assert cpu.gathers(found, n * n, 64, windows) is gathered
        assert not cpu.gathers(found, n * n, 64, windows._replace(groups=2))


@pytest.mark.parametrize("values", [
    lambda v: v.t().contiguous().t(), lambda v: torch.stack([v, v], 2)[..., 1], lambda v: v[:1].expand(4, -1),
])  # fmt: skip
def test_values_that_are_not_contiguous(way: str, values: Callable[[Tensor], Tensor]):
    x = packed(images(2))
    weight = torch.randn(3, 4, 3, 2, dtype=DOUBLE)
    x = x.with_values(values(x.values))
    for op in (lambda y: F.conv2d(y, weight, stride=2, padding=1), lambda y: F.max_pool2d(y, 2)):
        torch.testing.assert_close(list(op(x).unbind()), [op(row[None])[0] for row in x.unbind()])


SMALL = torch.tensor([[3, 2], [2, 4]])
HOW = (2, 1), (1, 1), (1, 2), 1  # stride, padding, dilation, groups


RESULTS = sum([math.prod(cpu.Windows((2, 2), *HOW).of(size)) for size in SMALL.tolist()])


def missing(which: int, *given: Tensor) -> Tensor:
    """The operation that gives the one of x, weight and gradient that is missing."""
    tensors: list[Any] = list(given[:2])
    tensors.insert(which, None)
    size: Any = [14, [2, 2], RESULTS][which]
    return convolve(*tensors, given[2] if len(given) > 2 else None, SMALL, size, *HOW)


def given_for(which: int, members: int | None = None) -> list[Tensor]:
    """What it takes: two of the three, and a bias where the result is missing."""
    torch.manual_seed(0)
    shapes = [(14, 2), (3, 2, 2, 2), (RESULTS, 3)]
    shapes = [shape for i, shape in enumerate(shapes) if i != which] + [(3,)] * (which == 2)
    first = () if members is None else (members,)
    return [torch.randn(*first, *shape, dtype=DOUBLE, requires_grad=True) for shape in shapes]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "weight", "result"])
def test_derivatives_of_each_operation(way: str, which: int):
    """Backwards, in a direction, twice, and forward over reverse."""
    fn, given = partial(missing, which), given_for(which)
    assert torch.autograd.gradcheck(fn, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fn, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("mapped", [(1, 0), (0, 1), (1, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "weight", "result"])
def test_members(which: int, mapped: tuple[int, int]):
    """vmap over either operand, and over gradients: each member by itself."""
    own = [*mapped, mapped[1]] if which == 2 else list(mapped)
    every = [t.detach() for t in given_for(which, 3)]
    given = [t if m else t[0] for t, m in zip(every, own, strict=True)]
    dims = tuple([0 if m else None for m in own])
    loss = lambda *args: missing(which, *args).pow(2).sum()  # noqa: E731
    for fn in (partial(missing, which), torch.func.grad(loss, tuple(range(len(given))))):
        found = torch.vmap(fn, dims)(*given)
        members = [fn(*[t[i] if m else t for t, m in zip(given, own, strict=True)]) for i in range(3)]
        whole = isinstance(found, Tensor)
        want = torch.stack(members) if whole else tuple([torch.stack(c) for c in zip(*members, strict=True)])
        torch.testing.assert_close(found, want)


def test_members_share_sizes():
    x, weight, *_ = given_for(2)
    with pytest.raises(StructureError, match="expected one ragged structure for all examples"):
        torch.vmap(lambda s: torch.ops.tdc.conv_rows(x, weight, None, s, RESULTS, *HOW))(SMALL[None])


def test_the_operators_by_themselves():
    """They have derivatives of their own, with which the bodies of loops are traced."""
    x, weight, bias = given_for(2)
    found = torch.ops.tdc.conv_rows(x, weight, bias, SMALL, RESULTS, *HOW)
    want = missing(2, x, weight, bias)
    torch.testing.assert_close(found, want)
    grads = [torch.autograd.grad(out.square().sum(), (x, weight, bias)) for out in (found, want)]
    torch.testing.assert_close(*grads)


def test_positions_that_are_not_those_of_the_sizes():
    """What would be read outside of memory is an error."""
    x, weight, bias = given_for(2)
    with pytest.raises(StructureError, match=r"tdc\.conv: expected as many positions as its sizes have"):
        torch.ops.tdc.conv_rows(x[:-1], weight, bias, SMALL, RESULTS, *HOW)
    with pytest.raises(StructureError, match=r"tdc\.conv: expected as many positions as its sizes have"):
        torch.ops.tdc.conv_rows(x, weight, bias, SMALL, RESULTS + 1, *HOW)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1),
        nn.Conv2d(6, 6, 3, padding="same", groups=2),
    )  # fmt: skip


def test_nothing_is_padded():
    net, x = network(), packed(images(2, dtype=torch.float32))
    with tdc.testing.forbid(padding=True, loops=True):
        y = net(x)
        y.values.sum().backward()
    net.eval()
    torch.testing.assert_close(list(net(x).unbind()), [net(row[None])[0] for row in x.unbind()])


def sized(*sizes: tuple[int, int]) -> NestedTensor:
    return tdc.pack([torch.randn(4, *size) for size in sizes], ragged_dim=(2, 3))


@pytest.mark.slow
def test_one_graph_for_all_sizes():
    """With one node for each convolution, forwards and backwards, and no second compilation."""
    net = network().eval()
    step = counted(net, backend="aot_eager", fullgraph=True)
    for sizes in (SIZES, ((8, 4), (3, 3)), ((5, 5), (12, 4), (5, 6), (2, 2))):
        x = sized(*sizes)
        x = x.with_values(x.values.detach().requires_grad_())
        leaves = [x.values, *net.parameters()]
        out, want = step(x), [net(row[None])[0] for row in x.unbind()]
        torch.testing.assert_close(list(out.unbind()), want)
        ours = torch.autograd.grad(out.values.square().sum(), leaves)
        theirs = torch.autograd.grad(torch.stack([w.square().sum() for w in want]).sum(), leaves)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


@pytest.mark.sweep
@pytest.mark.slow
def test_nodes_of_a_graph():
    graphs: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    net = network().eval().requires_grad_(False)
    torch.compile(net, backend=aot_autograd(fw_compiler=note), fullgraph=True)(packed(images(2, dtype=torch.float32)))
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert names.count("tdc.conv_rows.default") == 2
    assert names.count("aten.mm.default") + names.count("aten.addmm.default") == 1
    assert not [name for name in names if "aten.convolution" in name or "aten.index" in name]


@pytest.mark.slow
def test_exported():
    """Of torch's own operations, which need no Python."""
    net = network().eval()
    made = export(net, (sized((7, 5), (4, 9)),), dynamic={"input": {"batch": ("B", 0, 8)}})
    assert "_rows" not in str(made.program.graph)
    for sizes in (((7, 5), (4, 9)), ((3, 8), (8, 3), (6, 6))):
        x = sized(*sizes)
        torch.testing.assert_close(list(made(x).unbind()), [net(row[None])[0] for row in x.unbind()])


def filtered(x: NestedTensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight).values.pow(3).sum()


def of_second(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda t: torch.func.grad(loss)(t).square().sum())


def test_second_derivative_of_the_operator_in_a_graph():
    x, weight, _ = given_for(2)
    fn, given = of_second(lambda w: missing(2, x.detach(), w).pow(3).sum()), weight.detach()
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager", fullgraph=True)(given), fn(given))


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_derivatives_in_a_graph(twice: bool):
    """A second one, and that of several members."""
    loss = partial(filtered, packed(images(2)))
    of_members = torch.func.grad(lambda t: torch.vmap(loss)(t).sum())
    fn = of_second(loss) if twice else of_members
    given = torch.randn(3, 4, 2, 2, dtype=DOUBLE)
    given = given if twice else torch.stack([given, 2 * given])
    with refused("Expected FakeTensor"):
        torch.testing.assert_close(torch.compile(fn, backend="aot_eager", fullgraph=True)(given), fn(given))


def test_what_torch_refuses_goes_to_torch():
    x = packed(images(2))
    with pytest.raises(RuntimeError, match="scalar type"):
        F.conv2d(x, torch.randn(3, 4, 2, 2))


def test_windows_are_gathered_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """So that memory is bounded: the same numbers, whatever a piece holds."""
    given = given_for(2)[:2]
    monkeypatch.setattr(cpu, "gathers", lambda found, total, channels, w, wide=0: w.groups == 1)
    whole = missing(2, *given)
    want = [whole, *torch.autograd.grad(whole.square().sum(), given)]
    monkeypatch.setattr(cpu, "MOST", 3 * given[1][0].numel())
    assert len(cpu.pieces(RESULTS, given[1][0].numel())) > 1
    parts = missing(2, *given)
    torch.testing.assert_close([parts, *torch.autograd.grad(parts.square().sum(), given)], want)


@pytest.mark.slow
def test_batch_norm_of_positions_that_a_graph_does_not_know():
    """Behind a stride the number of positions is data; statistics of the batch, running ones, gradients."""
    found: list[Any] = []
    x = sized(*SIZES)
    for compiled in (False, True):
        net = network()
        run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        values = run(x).values
        found.append([values, *torch.autograd.grad(values.pow(2).sum(), list(net.parameters())), *net.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_same_padding_with_a_stride(padded: bool):
    x: Any = sized((4, 5), (3, 3))
    with pytest.raises(ShapeError, match=r"tdc\.conv2d: expected stride 1 where padding='same', got stride \(2, 1\)"):
        nn.functional.conv2d(x.to_padded() if padded else x, torch.randn(2, 4, 3, 3), stride=(2, 1), padding="same")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(30, 50), (50, 50)])
def test_a_filter_for_each_channel_in_half_precision(dtype: torch.dtype, lengths: tuple[int, ...]):
    """oneDNN does not return from some (torch 2.13): they run in float32 and are rounded once."""
    rows = [torch.randn(16, n).to(dtype) for n in lengths]
    weight, bias = torch.randn(16, 1, 17).to(dtype), torch.randn(16).to(dtype)
    got = F.conv1d(tdc.pack(rows, ragged_dim=2), weight, bias, padding=8, groups=16)
    for row, out in zip(rows, got.unbind(), strict=True):
        want = F.conv1d(row.float(), weight.float(), bias.float(), padding=8, groups=16)
        assert torch.equal(out, want.to(dtype)) or torch.allclose(out.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("wrong", [1.0, True, (1.0, 1), [1, True], "1", None])
def test_what_is_equal_to_an_int_is_refused_as_before(wrong: Any):
    x, weight = tdc.pack([torch.randn(2, 5, 4), torch.randn(2, 3, 6)], ragged_dim=(2, 3)), torch.randn(3, 2, 1, 1)
    for _ in range(2):
        F.conv2d(x, weight, stride=1)
        F.conv2d(x, weight, stride=[1, 1])
        with pytest.raises(TypeError):  # of torch, before it hands on, or a DtypeError
            F.conv2d(x, weight, stride=wrong)


def test_planes_with_a_dim_of_one_size_at_either_end():
    """Structures that share what is kept, since only their axes differ, have other planes."""
    rows, weight = [torch.randn(2, 5, 4, 6), torch.randn(2, 5, 6, 3)], torch.randn(3, 2, 2, 2, 2)
    x = tdc.pack(rows, ragged_dim=(3, 4))
    y = x.movedim(2, 4)
    for _ in range(2):
        for batch, order in ((x, (0, 1, 2, 3)), (y, (0, 2, 3, 1))):
            for found, row in zip(F.conv3d(batch, weight).unbind(), rows, strict=True):
                assert torch.allclose(found, F.conv3d(row.permute(order), weight), atol=1e-5)
