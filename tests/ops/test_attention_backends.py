"""Backends of attention within rows: which one runs where, and that each gives what a loop over examples gives.

Without a GPU the kernels of CUDA are stood in for: flex_attention runs unfused on CPU, and in place of the flash kernel
a function with its arguments and conventions computes by the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tdc
from tdc import NestedTensor
from tdc.compile import counted
from tdc.ops.attention import flash, scaled_dot_product
from tdc.ops.attention.choice import Call, backend
from tdc.ragged.nested import build_nested
from tdc.ragged.structure import Structure, extent_of

QUERIES, KEYS = (3, 0, 140, 5, 2), (4, 2, 150, 0, 6)  # more than one block, rows without queries and without keys
OTHERS = (((150, 7), (3, 160)), ((60, 2, 0, 90), (0, 70, 5, 71)))
BUILT = torch.backends.cuda.is_built()
HALF, WHOLE = torch.float16, torch.float32
GPU = Call("cuda", HALF, (64, 64), flash_head=192, fuses=True)

CHOICES: dict[str, tuple[Call, str]] = {
    "CPU": (Call("cpu", WHOLE, (64, 64)), "rows"),
    "CPU, mask": (Call("cpu", WHOLE, (64, 64), masked=True), "rows"),
    "CPU, mask that learns": (Call("cpu", WHOLE, (64, 64), masked=True, learns=True), "weights"),
    "CPU, score_mod": (Call("cpu", WHOLE, (64, 64), score_mod=True), "pairs"),
    "CPU, score_mod and dropout": (Call("cpu", WHOLE, (64, 64), score_mod=True, dropout=True), "pairs"),
    "CPU, score_mod in a direction": (Call("cpu", WHOLE, (64, 64), score_mod=True, moves=True), "padded"),
    "CPU, dropout": (Call("cpu", WHOLE, (64, 64), dropout=True), "weights"),
    "CPU, other size of values": (Call("cpu", WHOLE, (64, 32)), "weights"),
    "another device": (GPU._replace(device="mps"), "padded"),
    "half": (GPU, "flash"),
    "half outside a graph": (GPU._replace(fuses=False), "flash"),
    "bfloat16": (GPU._replace(dtype=torch.bfloat16), "flash"),
    "half, causal": (GPU._replace(causal=True), "flash"),
    "half, other rows": (GPU._replace(same_rows=False), "flash"),
    "half, causal, other rows": (GPU._replace(causal=True, same_rows=False), "flex"),
    "half, score_mod": (GPU._replace(score_mod=True), "flex"),
    "half, odd head size": (GPU._replace(sizes=(20, 20)), "flex"),
    "half, large head": (GPU._replace(sizes=(256, 256)), "flex"),
    "half, large head, large GPU": (GPU._replace(sizes=(256, 256), flash_head=256), "flash"),
    "half, no flash": (GPU._replace(flash_head=0), "flex"),
    "half, other size of values": (GPU._replace(sizes=(64, 32)), "flex"),
    "half, mask": (GPU._replace(masked=True), "padded"),
    "half, dropout": (GPU._replace(dropout=True), "padded"),
    "float32": (GPU._replace(dtype=WHOLE), "flex"),
    "float32, causal, other rows": (GPU._replace(dtype=WHOLE, causal=True, same_rows=False), "flex"),
    "float32 outside a graph": (GPU._replace(dtype=WHOLE, fuses=False), "padded"),
    "float32, mask": (GPU._replace(dtype=WHOLE, masked=True), "padded"),
    "float32, small head": (GPU._replace(dtype=WHOLE, sizes=(8, 8)), "padded"),
    "float32, huge head": (GPU._replace(dtype=WHOLE, sizes=(512, 512)), "padded"),
    "float64": (GPU._replace(dtype=torch.float64), "padded"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str):
    call, expected = CHOICES[name]
    assert backend(call) == expected


def batch(lengths: tuple[int, ...], heads: int, size: int, seed: int, like: Any = None) -> NestedTensor:
    """Rows (B, -1, H, D) whose values want a gradient."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, size, generator=g).to(like).requires_grad_()
    offsets = tdc.offsets_of(torch.tensor(lengths)).to(values.device)
    return NestedTensor(values, offsets, max_length=max(lengths))


def operands(queries: tuple[int, ...], keys: tuple[int, ...] | None, groups: int = 4, like: Any = WHOLE) -> list[Any]:
    """Queries, keys and values; of one structure where keys is None."""
    q = batch(queries, 4, 16, 0, like)
    k, v = (batch(keys or queries, groups, 16, seed, like) for seed in (1, 2))
    return [q, q.with_values(k.values), q.with_values(v.values)] if keys is None else [q, k, k.with_values(v.values)]


def run(*parts: Any, **options: Any) -> Tensor:
    q, k, v = parts
    return tdc.ops.varlen_attention(q.values, k.values, v.values, q.structure, k.structure, **options)


def one(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, score_mod: Any = None):
    """One example (L, H, D), by the definition."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        h, i, j = (torch.arange(n, device=q.device) for n in scores.shape)
        scores = score_mod(scores, None, h[:, None, None], i[:, None], j)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1) if scores.shape[-1] else scores
    return (weights @ v).transpose(0, 1)


def reference(q: NestedTensor, k: NestedTensor, v: NestedTensor, **options: Any) -> Tensor:
    return torch.cat([one(*each, **options) for each in zip(*[x.unbind() for x in (q, k, v)], strict=True)])


def results(fn: Callable[..., Tensor], parts: list[Any], options: dict[str, Any], more: tuple[Tensor, ...] = ()):
    """Output and gradients of the three operands, and of tensors that the options hold."""
    out = fn(*parts, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [*[x.values for x in parts], *more])]


def assert_same(fn: Callable[..., Tensor], parts: list[Any], options: dict[str, Any], more: tuple[Tensor, ...] = ()):
    got, want = results(fn, parts, options, more), results(reference, parts, options, more)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)


def with_slopes(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


alibi = with_slopes(SLOPES)


CASES: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {  # lengths of keys, options
    "self": (None, {}),
    "self causal": (None, {"causal": True, "scale": 0.3}),
    "cross": (KEYS, {}),
    "cross causal": (KEYS, {"causal": True}),
    "score_mod": (KEYS, {"score_mod": alibi}),
}
FLASH = ["self", "self causal", "cross"]


@pytest.fixture
def flexible(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention for all calls. On CPU torch refuses a backward, which its definition has all the same."""
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: "flex")
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by Dynamo inside torch
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("name", CASES)
def test_flex(flexible: None, name: str, groups: int):
    keys, options = CASES[name]
    more = (SLOPES,) if "score_mod" in options else ()
    assert_same(run, operands(QUERIES, keys, groups), options, more)


@pytest.mark.parametrize("name", [n if n == "cross causal" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_flex_in_one_graph(flexible: None, name: str):
    keys, options = CASES[name]
    call = counted(lambda *parts: run(*parts, **options), backend="aot_eager", fullgraph=True)
    for q, k in ((QUERIES, KEYS), *OTHERS):
        parts = operands(q, None if keys is None else k)
        assert_same(lambda *parts, **_: call(*parts), parts, options)
    assert call.counts.compiles == 1


def test_backward_of_flex_reads_what_its_functions_capture(flexible: None):
    """Rows and places of positions come to the backward's kernel as tensors: it is not lowered with what makes them."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    split = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=keep, partition_fn=split)
    options: dict[str, Any] = {"causal": True, "score_mod": alibi}
    call = counted(lambda *parts: run(*parts, **options), backend=backend, fullgraph=True)
    assert_same(lambda *parts, **_: call(*parts), operands(QUERIES, KEYS), options)
    nodes = [n for graph in graphs for n in graph.graph.nodes if "flex_attention_backward" in str(n.target)]
    captured = [c for n in nodes for c in (*n.args[-2], *n.args[-1])]
    assert len(nodes) == 1
    assert len(captured) >= 8
    assert {c.op for c in captured} == {"placeholder"}


def test_flex_only_where_it_becomes_a_kernel():
    """In a graph, of more than nothing, under no transform: flex_attention has no rule for those."""
    x, none, found = torch.ones(3, 2, 4), torch.ones(0, 2, 4), []

    def ask(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() * (2 if scaled_dot_product.fuses(x, y) else 1)

    for fn, args in (
        (ask, (x, x)),
        (torch.compile(ask, backend="eager", fullgraph=True), (x, x)),
        (torch.compile(ask, backend="eager", fullgraph=True), (x, none)),
        (torch.compile(torch.func.grad(ask), backend="eager", fullgraph=True), (x, x)),
        (torch.compile(torch.vmap(ask), backend="eager", fullgraph=True), (x[None], x[None])),
    ):
        found.append(fn(*args).flatten()[0].item())
    assert found == [24, 48, 24, 1, 24]


class Kernel:
    """What stands in for the flash kernel: its arguments and layouts, numbers by the definition, calls on record.

    Its causal mask is aligned with the ends of rows, as the kernel's is.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def rows(self, starts: tuple[Any, ...], queries: list[Tensor], keys: list[Tensor]) -> Iterator[list[Tensor]]:
        """The examples (H, L, D) of tensors of queries and of keys (N, H, D), with as many heads of keys."""
        self.calls.append(starts)
        sizes = []
        for offsets, limit in zip(starts[:2], starts[2:], strict=True):
            assert offsets.dtype == torch.int32
            assert offsets.diff().max() <= limit
            sizes.append(offsets.diff().tolist())
        heads = queries[0].shape[1]
        for t in (*queries, *keys):
            assert t.ndim == 3
            assert t.stride(2) == 1
            assert not [n for n in t.stride()[:2] if n % 8]
        parts = [t.split(sizes[0]) for t in queries]
        parts += [t.repeat_interleave(heads // t.shape[1], 1).split(sizes[1]) for t in keys]
        for example in zip(*parts, strict=True):
            yield [t.transpose(0, 1) for t in example]

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q @ k.mT * scale
        behind = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        return scores.masked_fill(behind, -math.inf) if causal else scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Any, k_starts: Any, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert dropout == 0
        assert not debug
        outs, sums, none = [], [], q.new_empty(0)
        for x, y, z in self.rows((q_starts, k_starts, max_q, max_k), [q], [k, v]):
            sums.append(self.scores(x, y, causal, scale).logsumexp(-1))
            outs.append(((self.scores(x, y, causal, scale) - sums[-1][..., None]).exp() @ z).transpose(0, 1))
        return torch.cat(outs), torch.cat(sums, 1).float(), none, none, none

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_starts: Any, k_starts: Any,
        max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
    ) -> Any:  # fmt: skip
        assert dropout == 0
        assert state.dtype == torch.uint64
        assert unused.numel() == 0
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        found: list[list[Tensor]] = []
        ends = q_starts[1:].tolist()
        for (g, x, o, y, z), end in zip(
            self.rows((q_starts, k_starts, max_q, max_k), [grad, q, out], [k, v]), ends, strict=True
        ):
            weights = (self.scores(x, y, causal, scale) - lse[:, end - x.shape[1] : end, None]).exp()
            slope = weights * (g @ z.mT - (g * o).sum(-1, keepdim=True)) * scale
            found.append([t.transpose(0, 1) for t in (slope @ y, slope.mT @ x, weights.mT @ g)])
        dq, dk, dv = (torch.cat(parts) for parts in zip(*found, strict=True))
        return dq, *[t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv)]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """The flash route for all calls, on CPU, with a kernel that stands in for torch's."""
    stand_in = Kernel()
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: "flash")
    monkeypatch.setattr(flash, "flash_forward", stand_in.forward)
    monkeypatch.setattr(flash, "flash_backward", stand_in.backward)
    torch._dynamo.reset()
    with torch.library._scoped_library("tdc", "IMPL") as library:
        library.impl("varlen_attention.flash", flash.forward_rows, "CPU")
        library.impl("varlen_attention_backward.flash", flash.backward_rows, "CPU")
        yield stand_in


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["heads", "groups", "one"])
@pytest.mark.parametrize("name", FLASH)
def test_flash(kernel: Kernel, name: str, groups: int):
    keys, options = CASES[name]
    assert_same(run, operands(QUERIES, keys, groups), options)
    longest = max(QUERIES), max(keys or QUERIES)
    assert [call[2:] for call in kernel.calls] == [longest, longest]
    starts = [tdc.offsets_of(torch.tensor(n)).int() for n in (QUERIES, keys or QUERIES)]
    assert all(torch.equal(a, b) for call in kernel.calls for a, b in zip(call[:2], starts, strict=True))


def test_flash_bounds_lengths_by_the_total(kernel: Kernel):
    """Where a structure does not carry its longest length; nothing is read from the device."""
    parts = [NestedTensor(x.values, x.offsets) for x in operands(QUERIES, KEYS)]
    assert_same(run, parts, {})
    assert [call[2:] for call in kernel.calls] == [(sum(QUERIES), sum(KEYS))] * 2


@pytest.mark.parametrize(("queries", "keys"), [((0, 0), (3, 2)), ((3, 2), (0, 0)), ((), ())])
def test_flash_of_nothing(kernel: Kernel, queries: tuple[int, ...], keys: tuple[int, ...]):
    """The kernel takes no empty tensors."""
    q, k, v = (
        NestedTensor(torch.randn(sum(n), 4, 16).requires_grad_(), tdc.offsets_of(torch.tensor(n, dtype=torch.int64)))
        for n in (queries, keys, keys)
    )
    out, *grads = results(run, [q, k, v], {})
    assert kernel.calls == []
    assert not any(t.any() for t in (out, *grads))


def test_flash_in_one_graph(kernel: Kernel):
    """For all lengths, the longest among them."""
    call = counted(lambda *parts: run(*parts, causal=True), backend="aot_eager", fullgraph=True)
    for lengths, _ in ((QUERIES, KEYS), *OTHERS):
        assert_same(lambda *parts, **_: call(*parts), operands(lengths, None, 2), {"causal": True})
        assert kernel.calls[-1][2:] == (max(lengths), max(lengths))
    assert call.counts.compiles == 1


def test_flash_under_transforms(kernel: Kernel):
    """vmap of a gradient, queries mapped and keys shared among members."""
    q, k, v = operands(QUERIES, KEYS, 2)
    many = torch.randn(3, *q.values.shape, generator=torch.Generator().manual_seed(5))

    def loss(fn: Callable[..., Tensor], values: Tensor, keys: Tensor) -> Tensor:
        return fn(q.with_values(values), k.with_values(keys), v).square().sum()

    ours: Any = torch.vmap(torch.func.grad(lambda *args: loss(run, *args), (0, 1)), (0, None))
    theirs = [torch.autograd.grad(loss(reference, t.requires_grad_(), k.values), (t, k.values)) for t in many.clone()]
    for got, want in zip(ours(many, k.values.detach()), zip(*theirs, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want), atol=2e-5, rtol=1e-4)


def test_flash_under_a_transform_in_a_graph(kernel: Kernel):
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
        rows: Any = (*[torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2)], 7, 9, False, 0.25)
        promised, (out, lse) = (
            torch.ops.tdc.varlen_attention.flash(q, k, v, *rows),
            flash.forward_rows(q, k, v, *rows),
        )
        assert [layout(t) for t in promised] == [layout(out), layout(lse)]
        args: Any = torch.empty_like(out), q, k, v, out, lse, *rows
        promised = torch.ops.tdc.varlen_attention_backward.flash(*args)
        with Recorder() as recorder:
            grads = flash.backward_rows(*args)
        assert [layout(t) for t in promised] == [layout(t) for t in grads]
        call = dict(recorder.seen)["aten._flash_attention_backward.default"]
        assert [t.dtype for t in call[6:8]] == [torch.int32] * 2
        assert call[8:12] == (7, 9, 0.0, False)


def test_a_call_on_cuda_takes_the_flash_kernel():
    with FakeTensorMode(), torch.no_grad(), Recorder() as recorder:
        values = torch.empty(10, 4, 16, dtype=HALF, device="cuda")
        offsets = torch.empty(3, dtype=torch.int64, device="cuda")
        x = build_nested(
            Structure(offsets, None, extent_of((7,), values.device), 0, 0, 1), values
        )  # lengths cannot be checked
        found = F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True)
    assert tuple(found.shape) == (2, 4, -1, 16)
    calls = [args for name, args in recorder.seen if name == "tdc.varlen_attention.flash"]
    assert [args[5:] for args in calls] == [(7, 7, True, 0.25)]


@pytest.mark.parametrize(
    ("dtype", "node"),
    [
        (torch.float16, "varlen_attention.flash"),
        pytest.param(torch.float32, "flex_attention", marks=pytest.mark.skipif(not BUILT, reason="built without CUDA")),
    ],
)
def test_a_graph_for_cuda_is_chosen_without_a_gpu(dtype: torch.dtype, node: str):
    """One node of the backend, and nothing of it read on the host."""
    nodes: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend([str(n.target) for n in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    call = counted(lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3), backend=keep, fullgraph=True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = torch.empty(10, 4, 16, dtype=dtype, device="cuda")
        found: Any = call(NestedTensor(values, torch.empty(3, dtype=torch.int64, device="cuda")))
    assert (found.values.device.type, found.values.dtype) == ("cuda", dtype)
    assert [n for n in nodes if "attention" in n] == [f"tdc.{node}" if "." in node else node]
    assert not [n for n in nodes if n in ("item", "tolist")]


def test_function_of_scores_in_half_precision():
    """What it computes in float32 does not widen the result."""
    parts = operands((3, 2), None, like=torch.bfloat16)
    got = run(*parts, score_mod=alibi)
    assert got.dtype == torch.bfloat16
    exact = reference(*[x.with_values(x.values.float()) for x in parts], score_mod=alibi)
    torch.testing.assert_close(got.float(), exact, atol=3e-2, rtol=3e-2)


TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 8e-2, torch.float32: 1e-4}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, groups: int, dtype: torch.dtype, compiled: bool):
    """Whatever backend is chosen: what the reference gives in float32."""
    torch._dynamo.reset()
    near, (keys, options) = torch.zeros((), dtype=dtype, device="cuda"), CASES[name]
    if "score_mod" in options:
        options = {"score_mod": with_slopes(SLOPES.detach().to(near.device))}
    call: Any = torch.compile(lambda *parts: run(*parts, **options), fullgraph=True)
    fn = (lambda *parts, **_: call(*parts)) if compiled else run
    for q, k in ((QUERIES, KEYS), *OTHERS):
        parts = operands(q, None if keys is None else k, groups, near)
        exact = [x.with_values(x.values.detach().float().requires_grad_()) for x in parts]
        for a, b in zip(results(fn, parts, options), results(reference, exact, options), strict=True):
            torch.testing.assert_close(a.float(), b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_derivative_that_a_graph_would_leave_out():
    """Dynamo inlines a function whose inputs want no gradient at the level of vmap; an outer `grad` would lose it."""
    rows = tdc.pack([torch.randn(n, 2, 4) for n in (3, 5, 2)])

    def loss(v: Any) -> Any:
        def one(v: Any) -> Any:
            x = rows.with_values(v).transpose(1, 2)
            out: Any = F.scaled_dot_product_attention(x, x, x)
            return out.values.square().sum()

        return torch.vmap(one)(v).square().sum()

    values, fn = torch.randn(4, 10, 2, 4), torch.func.grad(loss)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager", fullgraph=True)(values), fn(values))
