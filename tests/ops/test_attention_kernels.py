"""Attention by the kernels of CUDA for packed rows: what the operators ask of them, and what they make of the answer.

Without a GPU functions with the arguments and conventions of the kernels compute by the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_kernels import Efficient, Flash, Kernel, standing_in
from packed_attention import CASES, KEYS, OTHERS, QUERIES, assert_same, operands, reference, results, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tdc
from tdc import NestedTensor
from tdc.compile import counted
from tdc.core.torch_functions import argument_names
from tdc.kernels.attention import efficient, flash
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.nested import build_nested

FLASH = ["self", "self causal", "cross"]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    with standing_in(monkeypatch, "flash", Flash()) as stand_in:
        yield stand_in


@pytest.fixture
def efficient_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Efficient]:
    with standing_in(monkeypatch, "efficient", Efficient()) as stand_in:
        yield stand_in


@pytest.fixture(params=["flash", "efficient"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Flash() if request.param == "flash" else Efficient()
    with standing_in(monkeypatch, request.param, kernel) as stand_in:
        yield stand_in


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["heads", "groups", "one"])
@pytest.mark.parametrize("name", FLASH)
def test_flash(kernel: Flash, name: str, groups: int):
    keys, options = CASES[name]
    assert_same(run, operands(QUERIES, keys, groups), options)
    longest = max(QUERIES), max(keys or QUERIES)
    assert [call[2:] for call in kernel.calls] == [longest, longest]
    starts = [tdc.offsets_of(torch.tensor(n)).int() for n in (QUERIES, keys or QUERIES)]
    assert all(torch.equal(a, b) for call in kernel.calls for a, b in zip(call[:2], starts, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_in_a_window(kernel: Flash, causal: bool):
    parts = operands(QUERIES, None)

    def near(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.where((i - j).abs() < 7, score, -torch.inf)

    got = results(run, parts, {"window": 7, "causal": causal})
    want = results(reference, parts, {"score_mod": near, "causal": causal})
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert kernel.sides == (6, 0 if causal else 6)


def test_flash_bounds_lengths_by_the_total(kernel: Flash):
    """Where a structure does not carry its longest length; nothing is read from the device."""
    parts = [NestedTensor(x.values, x.offsets) for x in operands(QUERIES, KEYS)]
    assert_same(run, parts, {})
    assert [call[2:] for call in kernel.calls] == [(sum(QUERIES), sum(KEYS))] * 2


@pytest.mark.parametrize("bound", [True, False], ids=["longest", "total"])
@pytest.mark.parametrize("size", [16, 6, 72])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", [*FLASH, "cross causal"])
def test_efficient(efficient_kernel: Efficient, name: str, groups: int, size: int, bound: bool):
    """Every head size, and causal rows of other lengths; what no row meets is 0, not what the kernel leaves there."""
    keys, options = CASES[name]
    parts = operands(QUERIES, keys, groups, size=size)
    if not bound:
        parts = [NestedTensor(x.values, x.offsets) for x in parts]
    assert_same(run, parts, options)
    longest = max(QUERIES), max(keys or QUERIES)
    assert [c[2:] for c in efficient_kernel.calls] == [longest if bound else (sum(QUERIES), sum(keys or QUERIES))] * 2


def test_efficient_values_of_another_size(efficient_kernel: Efficient):
    q, k, _ = operands(QUERIES, KEYS)
    v = k.with_values(torch.randn(sum(KEYS), 4, 5, requires_grad=True))
    assert_same(run, [q, k, v], {})


@pytest.mark.parametrize(("queries", "keys"), [((0, 0), (3, 2)), ((3, 2), (0, 0)), ((), ())])
def test_nothing(either: Kernel, queries: tuple[int, ...], keys: tuple[int, ...]):
    """The kernels take no empty tensors."""
    q, k, v = (
        NestedTensor(torch.randn(sum(n), 4, 16).requires_grad_(), tdc.offsets_of(torch.tensor(n, dtype=torch.int64)))
        for n in (queries, keys, keys)
    )
    out, *grads = results(run, [q, k, v], {})
    assert either.calls == []
    assert not any(t.any() for t in (out, *grads))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(either: Kernel, causal: bool):
    """Forward and backward drop the same weights: gradients are slopes of what one draw gives."""
    q, k, v = operands((3, 0, 4), None if causal else (4, 2, 0), like=torch.float64, size=8)

    def fn(*values: Tensor) -> Tensor:
        torch.manual_seed(4)
        return run(*[x.with_values(t) for x, t in zip((q, k, v), values, strict=True)], causal=causal, dropout=0.4)

    values = [x.values for x in (q, k, v)]
    assert torch.autograd.gradcheck(fn, values, fast_mode=True)
    assert not torch.equal(fn(*values), run(q, k, v, causal=causal))


def test_all_dropped(either: Kernel):
    parts = operands(QUERIES, None)
    out, *grads = results(run, parts, {"dropout": 1.0})
    assert not any(t.any() for t in (out, *grads))


def test_dropout_has_one_derivative(either: Kernel):
    q, k, v = operands(QUERIES, None)
    out = run(q, k, v, dropout=0.4)
    first = torch.autograd.grad(out.square().sum(), q.values, create_graph=True)[0]
    with pytest.raises(tdc.UnsupportedError, match="one derivative of dropout"):
        first.sum().backward()


def check_second_derivative(window: int | None) -> None:
    q, k, v = operands((3, 0, 4), None, like=torch.float64, size=8)

    def fn(*values: Tensor) -> Tensor:
        return run(*[x.with_values(t) for x, t in zip((q, k, v), values, strict=True)], causal=True, window=window)

    assert torch.autograd.gradgradcheck(fn, [x.values for x in (q, k, v)], fast_mode=True)


def test_second_derivative(either: Kernel):
    check_second_derivative(None)


def test_second_derivative_in_a_window(kernel: Flash):
    check_second_derivative(2)


def test_dropout_under_vmap(either: Kernel):
    """Each member drops weights of its own; a gradient for several results drops what their one forward part did."""
    q, k, v = operands((3, 4), None, size=8)
    ones = [x.with_values(torch.ones_like(x.values)) for x in (q, k, v)]
    many = torch.ones(2, *q.values.shape)

    def fn(values: Tensor) -> Tensor:
        return run(ones[0].with_values(values), ones[1], ones[2], dropout=0.5)

    first, second = torch.vmap(fn, randomness="different")(many)
    assert not torch.equal(first, second)
    for randomness in ("error", "same"):
        with pytest.raises(tdc.UnsupportedError, match="for each example on CUDA"):
            torch.vmap(fn, randomness=randomness)(many)

    y, back = torch.func.vjp(
        lambda values: run(q, k, v.with_values(values), dropout=0.5).sum((1, 2)), v.values.detach()
    )
    rows = torch.vmap(lambda g: back(g)[0])(torch.eye(len(y)))
    torch.testing.assert_close(rows, torch.stack([back(g)[0] for g in torch.eye(len(y))]))


def test_dropout_of_members_and_their_gradients(either: Kernel):
    """Under vmap the backward part meets the heads in the order in which the forward part drew for them."""
    q, k, v = operands((3, 4), None, size=8)
    many = torch.randn(3, *v.values.shape)

    def fn(values: Tensor) -> Tensor:
        return run(q, k, v.with_values(values), dropout=0.5).square().sum()

    def seeded(f: Any) -> Any:
        torch.manual_seed(2)
        return torch.vmap(f, randomness="different")(many)

    grads, step = seeded(torch.func.grad(fn)), 1e-3
    assert grads.abs().max() > 0.1
    towards = torch.randn(many.shape)
    low, high = [], []
    for sign, found in ((-1, low), (1, high)):
        torch.manual_seed(2)
        found.append(torch.vmap(fn, randomness="different")(many + sign * step * towards))
    slope = (high[0] - low[0]) / (2 * step)
    torch.testing.assert_close((grads * towards).sum((1, 2, 3)), slope, atol=2e-2, rtol=2e-2)


def test_one_graph(either: Kernel):
    """For all lengths, the longest among them; a node each for forward and backward, that draws when it runs."""
    call = counted(lambda *parts: run(*parts, causal=True), backend="aot_eager", fullgraph=True)
    for lengths, _ in ((QUERIES, KEYS), *OTHERS):
        assert_same(lambda *parts, **_: call(*parts), operands(lengths, None, 2), {"causal": True})
        assert either.calls[-1][2:] == (max(lengths), max(lengths))
    assert call.counts.compiles == 1


def test_dropout_in_a_graph(either: Kernel):
    call: Any = torch.compile(lambda *parts: run(*parts, dropout=0.5), backend="aot_eager", fullgraph=True)
    parts = operands(QUERIES, None)
    for fn in (run, call):
        torch.manual_seed(7)
        results(fn, parts, {"dropout": 0.5} if fn is run else {})
    torch.manual_seed(7)
    want = results(run, parts, {"dropout": 0.5})
    torch.manual_seed(7)
    for a, b in zip(results(call, parts, {}), want, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms(either: Kernel):
    """vmap of a gradient, queries mapped and keys shared among members."""
    q, k, v = operands(QUERIES, KEYS, 2)
    many = torch.randn(3, *q.values.shape, generator=torch.Generator().manual_seed(5))

    def loss(fn: Callable[..., Tensor], values: Tensor, keys: Tensor) -> Tensor:
        return fn(q.with_values(values), k.with_values(keys), v).square().sum()

    ours: Any = torch.vmap(torch.func.grad(lambda *args: loss(run, *args), (0, 1)), (0, None))
    theirs = [torch.autograd.grad(loss(reference, t.requires_grad_(), k.values), (t, k.values)) for t in many.clone()]
    for got, want in zip(ours(many, k.values.detach()), zip(*theirs, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want), atol=2e-5, rtol=1e-4)


def test_a_transform_in_a_graph(either: Kernel):
    q, k, v = operands(QUERIES, KEYS, 2)
    ours: Any = torch.func.grad(lambda values: run(q.with_values(values), k, v).square().sum())
    want = torch.autograd.grad(reference(q, k, v).square().sum(), q.values)[0]
    got = torch.compile(ours, backend="aot_eager", fullgraph=True)(q.values.detach())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_rows_that_the_kernel_cannot_load_are_copied():
    x = torch.randn(6, 4, 32)
    for good in (x, x[:, :, 8:24], x.transpose(0, 1), x.unflatten(1, (2, 2)).unbind(1)[1]):
        assert flash.loadable(good) is good
    for bad in (x[:, :, 1:17], x.mT, torch.randn(6, 4, 36)[..., :32], torch.ones(1, 1, 1).expand(6, 4, 32)):
        got = flash.loadable(bad)
        assert got.is_contiguous()
        assert got.storage_offset() == 0
        assert torch.equal(got, bad)


class Recorder(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), args))
        return func(*args, **(kwargs or {}))


def layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.device.type


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [4, 2])
def test_flash_on_tensors_without_data(dtype: torch.dtype, groups: int):
    """torch's kernel takes our arguments, and the op says of its results what they are."""
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(4, 10, 16, dtype=dtype, device="cuda").transpose(0, 1)
        k, v = torch.empty(12, 2, groups, 16, dtype=dtype, device="cuda").unbind(1)
        starts = [torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2)]
        rest: Any = 7, 9, 0, False, 0.25, 0.1
        promised = torch.ops.tdc.varlen_attention.flash(q, k, v, *starts, *rest)
        out, lse, *state = flash.forward_rows(q, k, v, *starts, *rest)
        assert [layout(t) for t in promised] == [layout(t) for t in (out, lse, *state)]
        args: Any = torch.empty_like(out), q, k, v, out, lse, *starts, *state, *rest
        promised = torch.ops.tdc.varlen_attention_backward.flash(*args)
        with Recorder() as recorder:
            grads = flash.backward_rows(*args)
        assert [layout(t) for t in promised] == [layout(t) for t in grads]
        call = dict(recorder.seen)["aten._flash_attention_backward.default"]
        assert [t.dtype for t in call[6:8]] == [torch.int32] * 2
        assert call[8:12] == (7, 9, 0.1, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_efficient_on_tensors_without_data(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """torch's kernel takes our arguments, and the op says of its results what they are. What torch has for backward
    without data leaves one argument out (2.11-2.13), so that it is asked for the names alone."""
    given: dict[str, Any] = {}

    def backward(*args: Any, scale: float) -> Any:
        given.update(zip(argument_names(torch.ops.aten._efficient_attention_backward.default), args, strict=False))
        return [torch.empty_like(t) for t in args[1:4]]

    monkeypatch.setattr(efficient, "efficient_backward", backward)
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(n, 4, 20, dtype=dtype, device="cuda") for n in (10, 12))
        v = torch.empty(12, 4, 7, dtype=dtype, device="cuda")
        starts = [torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2)]
        rest: Any = 70, 9, 0, True, 0.25, 0.1
        promised = torch.ops.tdc.varlen_attention.efficient(q, k, v, *starts, *rest)
        out, lse, *state = efficient.forward_rows(q, k, v, *starts, *rest)
        assert [layout(t) for t in promised] == [layout(t) for t in (out, lse, *state)]
        args: Any = torch.empty_like(out), q, k, v, out, lse, *starts, *state, *rest
        promised = torch.ops.tdc.varlen_attention_backward.efficient(*args)
        grads = efficient.backward_rows(*args)
        assert [layout(t) for t in promised] == [layout(t) for t in grads]
    assert [given[name].dtype for name in ("cu_seqlens_q", "cu_seqlens_k")] == [torch.int32] * 2
    options = [given[name] for name in ("max_seqlen_q", "max_seqlen_k", "dropout_p", "custom_mask_type")]
    assert options == [10, 9, 0.1, 1]
    assert (given["philox_seed"], given["philox_offset"]) == tuple(state)
    assert [given[name].shape[3] * dtype.itemsize % 16 for name in ("grad_out_", "query", "key", "value", "out")] == [
        0
    ] * 5


def test_a_call_on_cuda_takes_the_flash_kernel():
    with FakeTensorMode(), torch.no_grad(), Recorder() as recorder:
        values = torch.empty(10, 4, 16, dtype=torch.float16, device="cuda")
        offsets = torch.empty(3, dtype=torch.int64, device="cuda")
        x = build_nested(
            Structure(offsets, None, extent_of((7,), values.device), 0, 0, 1), values
        )  # lengths cannot be checked
        found = F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True)
    assert tuple(found.shape) == (2, 4, -1, 16)
    calls = [args for name, args in recorder.seen if name == "tdc.varlen_attention.flash"]
    assert [args[5:] for args in calls] == [(7, 7, 0, True, 0.25, 0.0)]
