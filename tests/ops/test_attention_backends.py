"""Backends of attention within rows: which one runs where, and that each gives what a loop over examples gives.

Without a GPU flex_attention runs unfused on CPU; kernels for packed rows are in `test_attention_kernels`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from packed_attention import (
    CASES,
    KEYS,
    OTHERS,
    QUERIES,
    SLOPES,
    alibi,
    assert_same,
    operands,
    reference,
    results,
    run,
    with_slopes,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

import tdc
from tdc import NestedTensor
from tdc.compile import counted
from tdc.kernels.attention.rectangle import How
from tdc.ops.attention import scaled_dot_product
from tdc.ops.attention.choice import Call, backend
from tdc.ops.attention.scaled_dot_product import call_of

HALF, WHOLE = torch.float16, torch.float32
GPU = Call("cuda", HALF, (64, 64), flash_head=192, efficient=True, fuses=True)

CHOICES: dict[str, tuple[Call, str]] = {
    "CPU": (Call("cpu", WHOLE, (64, 64)), "rows"), "CPU, mask": (Call("cpu", WHOLE, (64, 64), masked=True), "rows"),
    "CPU, mask that learns": (Call("cpu", WHOLE, (64, 64), masked=True, learns=True), "weights"),
    "CPU, score_mod": (Call("cpu", WHOLE, (64, 64), score_mod=True), "padded"),
    "CPU, score_mod and dropout": (Call("cpu", WHOLE, (64, 64), score_mod=True, dropout=True), "padded"),
    "CPU, score_mod in a direction": (Call("cpu", WHOLE, (64, 64), score_mod=True, moves=True), "padded"),
    "CPU, dropout": (Call("cpu", WHOLE, (64, 64), dropout=True), "weights"),
    "CPU, other size of values": (Call("cpu", WHOLE, (64, 32)), "weights"),
    "another device": (GPU._replace(device="mps"), "padded"), "half": (GPU, "flash"),
    "half outside a graph": (GPU._replace(fuses=False), "flash"),
    "bfloat16": (GPU._replace(dtype=torch.bfloat16), "flash"), "half, causal": (GPU._replace(causal=True), "flash"),
    "half, other rows": (GPU._replace(same_rows=False), "flash"),
    "half, dropout": (GPU._replace(dropout=True), "flash"), "half, window": (GPU._replace(windowed=True), "flash"),
    "half, window, other rows": (GPU._replace(windowed=True, same_rows=False), "efficient"),
    "half, causal, other rows": (GPU._replace(causal=True, same_rows=False), "efficient"),
    "half, score_mod": (GPU._replace(score_mod=True), "flex"),
    "half, score_mod outside a graph": (GPU._replace(score_mod=True, fuses=False), "padded"),
    "half, score_mod and dropout": (GPU._replace(score_mod=True, dropout=True), "padded"),
    "half, odd head size": (GPU._replace(sizes=(20, 20)), "efficient"),
    "half, large head": (GPU._replace(sizes=(256, 256)), "efficient"),
    "half, large head, large GPU": (GPU._replace(sizes=(256, 256), flash_head=256), "flash"),
    "half, no flash": (GPU._replace(flash_head=0), "efficient"),
    "half, neither": (GPU._replace(flash_head=0, efficient=False), "padded"),
    "half, other size of values": (GPU._replace(sizes=(64, 32)), "efficient"),
    "half, mask": (GPU._replace(masked=True), "flex"),
    "half, mask outside a graph": (GPU._replace(masked=True, fuses=False), "padded"),
    "half, mask and dropout": (GPU._replace(masked=True, dropout=True), "padded"),
    "float32": (GPU._replace(dtype=WHOLE), "efficient"),
    "float32, dropout": (GPU._replace(dtype=WHOLE, dropout=True), "efficient"),
    "float32, causal, other rows": (GPU._replace(dtype=WHOLE, causal=True, same_rows=False), "efficient"),
    "float32 outside a graph": (GPU._replace(dtype=WHOLE, fuses=False), "efficient"),
    "float32, mask": (GPU._replace(dtype=WHOLE, masked=True), "flex"),
    "float32, mask, small head": (GPU._replace(dtype=WHOLE, masked=True, sizes=(8, 8)), "padded"),
    "float32, score_mod, huge head": (GPU._replace(dtype=WHOLE, score_mod=True, sizes=(512, 512)), "padded"),
    "float32, huge head": (GPU._replace(dtype=WHOLE, sizes=(512, 512)), "efficient"),
    "float64": (GPU._replace(dtype=torch.float64), "padded"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str):
    call, expected = CHOICES[name]
    assert backend(call) == expected


def test_the_facts_of_a_call():
    x = tdc.pack([torch.randn(n, 2, 8) for n in (3, 2)])
    q, rows, other = x.values, x.structure, tdc.pack([torch.ones(n) for n in (3, 2)]).structure
    assert call_of(q, q, q[..., :4], rows, rows, How(causal=True)) == Call("cpu", WHOLE, (8, 4), causal=True)
    how = How(False, mask=torch.zeros(3, 3, requires_grad=True), dropout=0.5, score_mod=alibi)
    facts = {"masked": True, "learns": True, "dropout": True, "score_mod": True, "windowed": True, "same_rows": False}
    assert call_of(q, q, q, rows, other, how, 2) == Call("cpu", WHOLE, (8, 8), **facts)


MASKS: dict[str, Any] = {
    "of all": lambda: torch.randn(160, 170),
    "of heads": lambda: torch.randn(1, 4, 160, 170),
    "of examples": lambda: torch.randn(5, 1, 160, 170),
    "of keys": lambda: torch.randn(1, 170),
    "bool": lambda: torch.rand(5, 4, 160, 170) < 0.7,
    "of nothing": lambda: torch.zeros(160, 170, dtype=torch.bool),
    "ragged": lambda: tdc.pack([torch.randn(n, m) for n, m in zip(QUERIES, KEYS, strict=True)], ragged_dim=(1, 2)),
    "ragged, of heads": lambda: tdc.pack(
        [torch.randn(4, n, m) for n, m in zip(QUERIES, KEYS, strict=True)], ragged_dim=(2, 3)
    ),
}


@pytest.fixture
def flexible(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention for all calls. On CPU torch refuses a backward, which its definition has all the same."""
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: "flex")
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()


@pytest.mark.cases(4, 3)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by Dynamo inside torch
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("name", CASES)
def test_flex(flexible: None, name: str, groups: int):
    keys, options = CASES[name]
    more = (SLOPES,) if "score_mod" in options else ()
    assert_same(run, operands(QUERIES, keys, groups), options, more)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", [n if n == "cross causal" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_flex_in_one_graph(flexible: None, name: str):
    keys, options = CASES[name]
    call = counted(lambda *parts: run(*parts, **options), backend="aot_eager", fullgraph=True)
    for q, k in ((QUERIES, KEYS), *OTHERS):
        parts = operands(q, None if keys is None else k)
        assert_same(lambda *parts, **_: call(*parts), parts, options)
    assert call.counts.compiles == 1


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MASKS)
def test_flex_with_a_mask(flexible: None, monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool):
    """What padded rows give; eagerly gradients of the mask as well, of which a graph that nobody lowers has none."""
    mask, parts = MASKS[name](), operands(QUERIES, KEYS)
    more = mask.values if isinstance(mask, NestedTensor) else mask
    learned = (more.requires_grad_(),) if more.is_floating_point() and not compiled else ()
    options: dict[str, Any] = {"mask": mask, "scale": 0.3}
    fn: Any = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    got = results(fn, parts, options, learned)
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: "padded")
    for a, b in zip(got, results(run, parts, options, learned), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_flex_makes_no_graph_for_the_sizes_of_a_mask(flexible: None):
    call = counted(lambda q, k, v, mask: run(q, k, v, mask=mask), backend="eager", fullgraph=True)
    for n in (160, 170, 180):
        call(*operands(QUERIES, KEYS), torch.zeros(n, n + 3))
    assert call.counts.compiles == 2  # the second one is for all sizes


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_refuses_a_mask_that_is_too_small(flexible: None):
    with pytest.raises(tdc.ShapeError, match=r"at least the longest rows, got .*139, 150"):
        run(*operands(QUERIES, KEYS), mask=torch.zeros(139, 150))


@pytest.mark.slow
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
        return x.sum() * (2 if scaled_dot_product.becomes_kernel(x, y) else 1)

    for fn, args in (
        (ask, (x, x)),
        (torch.compile(ask, backend="eager", fullgraph=True), (x, x)),
        (torch.compile(ask, backend="eager", fullgraph=True), (x, none)),
        (torch.compile(torch.func.grad(ask), backend="eager", fullgraph=True), (x, x)),
        (torch.compile(torch.vmap(ask), backend="eager", fullgraph=True), (x[None], x[None])),
    ):
        found.append(fn(*args).flatten()[0].item())
    assert found == [24, 48, 24, 1, 24]


@pytest.mark.parametrize(
    ("dtype", "node"),
    [(torch.float16, "varlen_attention.flash"), (torch.float32, "varlen_attention.efficient")],
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
