"""Stock modules on ragged batches: eager and compiled, forward and backward, against a loop over examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness import Counter
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state

import tdc
from tdc.testing.batches import Cut, Ragged, build, by_how_much, differences, gradients, is_close, unbuild

SIZE = 8
LENGTHS = (3, 0, 5, 1)
OTHERS = ((2, 6, 1, 0, 4), (7, 2, 3))
KINDS = ("nested", "masked")


def rows(lengths: tuple[int, ...] = LENGTHS, size: int | None = SIZE, seed: int = 0) -> Ragged:
    """A ragged batch (B, -1, size) of leaves; of class numbers where `size` is None."""
    g = torch.Generator().manual_seed(seed)
    if size is None:
        return Ragged([torch.randint(0, 5, (n,), generator=g) for n in lengths], slack=2)
    return Ragged([torch.randn(n, size, generator=g).requires_grad_() for n in lengths], slack=2)


def weighted(outputs: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients under cotangents that depend on shapes alone."""
    g = torch.Generator().manual_seed(1)
    return gradients(list(outputs), [torch.randn(t.shape, generator=g) for t in outputs], leaves)


def assert_same(
    module: nn.Module, kind: str, xs: list[Ragged], run: Callable[..., Any], ref: Callable[..., Tensor] | None = None
) -> None:
    """`run(module, *batches)` equals `ref(module, *rows)` for each row, gradients of rows and parameters as well."""
    want = [(ref or run)(module, *each) for each in zip(*[x.rows for x in xs], strict=True)]
    cut = Cut()
    got = unbuild(run(module, *build(xs, kind, cut)))
    assert differences(got, xs[0].with_rows(want), kind) == []
    params, leaves = list(module.parameters()), [r for x in xs for r in x.rows if r.requires_grad]
    found = weighted(got.rows, [*params, *cut.inner])
    ours = [*found[: len(params)], *cut.back(found[len(params) :], leaves)]
    pairs = zip(ours, weighted(want, [*params, *leaves]), [*params, *leaves], strict=True)
    wrong = [f"{tuple(leaf.shape)}{by_how_much(a, b)}" for a, b, leaf in pairs if not is_close(a, b)]
    assert wrong == []


def compiled(run: Callable[..., Any], counter: Counter) -> Callable[..., Any]:
    """`run` as one graph."""
    return torch.compile(run, fullgraph=True, backend=counter)


def plain(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


def attend(module: nn.Module, *inputs: Any) -> Any:
    """Self-attention for one operand, cross-attention for two."""
    return module(inputs[0], inputs[-1], inputs[-1], need_weights=False)[0]


def causal(module: nn.Module, x: Any) -> Any:
    return module(x, x, x, attn_mask=torch.ones(1, 1), is_causal=True, need_weights=False)[0]


def causal_row(module: nn.Module, x: Tensor) -> Any:
    mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return module(x, x, x, attn_mask=mask, need_weights=False)[0]


def layer(norm_first: bool = False, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, **options)


def mha(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(SIZE, 2, batch_first=True, **options)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)  # zero biases would hide keys made of padding
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, 5),
    "layer_norm": lambda: nn.LayerNorm(SIZE),
    "dropout_eval": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5)).eval(),
    "mlp": lambda: nn.Sequential(nn.Linear(SIZE, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3), nn.Tanh()),
    "inplace": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Softmax(-1)),
    "encoder_layer": layer,
    "encoder_layer_norm_first": lambda: layer(norm_first=True, activation="gelu"),
    "encoder_layer_eval": lambda: layer().eval(),
    "encoder": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "encoder_eval": lambda: nn.TransformerEncoder(layer(), 2, nn.LayerNorm(SIZE), enable_nested_tensor=False).eval(),
    "sequential": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), layer(), nn.ReLU(), layer(True), nn.Linear(SIZE, 2)),
}  # fmt: skip


FORMS = ("self", "cross", "causal", "no_bias", "separate")


def slow(name: str) -> Any:
    """What another name shows too, compiled among the slow tests."""
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, kind: str):
    assert_same(MODULES[name](), kind, [rows()], plain)


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("kind", ["nested", slow("masked")])
@pytest.mark.parametrize("name", ["mlp", "encoder_layer", slow("encoder_layer_norm_first"), slow("encoder_eval")])
def test_module_compiled(name: str, kind: str):
    module, counter = MODULES[name](), Counter()
    run = compiled(plain, counter)
    for lengths in (LENGTHS, *OTHERS):
        assert_same(module, kind, [rows(lengths)], run, plain)
    assert counter.graphs == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attention(form: str, kind: str):
    assert_attends(form, kind, compile=False)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("form", ["self", *map(slow, FORMS[1:])])
@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attention_compiled(form: str, kind: str):
    assert_attends(form, kind, compile=True)


def assert_attends(form: str, kind: str, *, compile: bool) -> None:
    """Attention as the loop over examples has it, compiled in one graph for all lengths."""
    options = {"no_bias": {"bias": False}, "separate": {"kdim": 6, "vdim": 6}}.get(form, {})
    module, (run, ref) = mha(**options), (causal, causal_row) if form == "causal" else (attend, attend)
    counter = Counter()
    call = compiled(run, counter) if compile else run
    for lengths in (LENGTHS, *OTHERS) if compile else (LENGTHS, (4, 4)):
        xs = [rows(lengths)]
        if form in ("cross", "separate"):
            xs.append(rows(tuple(n + 1 if n else 0 for n in reversed(lengths)), 6 if form == "separate" else SIZE, 1))
        assert_same(module, kind, xs, call, ref)
    assert not compile or counter.graphs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attention_sequence_first(kind: str):
    """batch_first=False: the batch is dim 1, as torch has it."""
    module = nn.MultiheadAttention(SIZE, 2)
    x = Ragged(rows().rows, (0,), 1, slack=2)
    assert_same(module, kind, [x], attend)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_encoder_layer(kind: str):
    def run(module: nn.Module, x: Any) -> Any:
        return module(x, src_mask=torch.ones(1, 1), is_causal=True)

    def ref(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, src_mask=torch.ones(len(x), len(x), dtype=torch.bool).triu(1))

    assert_same(layer(), kind, [rows((3, 2, 5, 1))], run, ref)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "another"])
def test_a_stack_reads_a_mask_of_which_a_graph_does_not_know_whether_it_is_causal(causal: bool):
    """torch compares the mask with a causal one, by value; a dense batch of it compiles with `is_causal=` only."""
    module = nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else torch.eye(7, dtype=torch.bool).roll(1, 0)
    examples = rows((3, 2, 5))
    x = build(examples, "masked", torch.Tensor.detach)

    def run(x: Any) -> Any:
        return module(x, mask=mask)

    want = [module(r, mask=mask[: len(r), : len(r)], is_causal=False) for r in examples.rows]
    for fn in (run, torch.compile(run, backend="eager", fullgraph=True)):
        assert all(is_close(a, b) for a, b in zip(unbuild(fn(x)).rows, want, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_dropout_runs(kind: str):
    """Random, so only what does not depend on the draw: structure, finite gradients, and that something is dropped."""
    module = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.5, batch_first=True)
    x = rows()
    got = unbuild(module(build(x, kind, lambda t: t)))
    assert [len(r) for r in got.rows] == list(LENGTHS)
    assert all(bool(g.isfinite().all()) for g in weighted(got.rows, [*module.parameters(), *x.rows]))
    drop = nn.Dropout(0.5)
    ones = Ragged([torch.ones(n, 50) for n in LENGTHS], slack=2)
    values = torch.cat(unbuild(drop(build(ones, kind, lambda t: t))).rows)
    assert set(values.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < float((values == 0).float().mean()) < 0.7


@pytest.mark.slow
def test_training_with_dropout_compiles():
    module, counter = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.5, batch_first=True), Counter()
    run = compiled(plain, counter)
    for lengths in (LENGTHS, *OTHERS):
        cut = Cut()
        got = unbuild(run(module, build(rows(lengths), "nested", cut)))
        assert all(bool(g.isfinite().all()) for g in weighted(got.rows, [*module.parameters(), *cut.inner]))
    assert counter.graphs == 1


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_inductor(kind: str):
    """The default backend makes kernels of the same graph."""
    module = layer()
    run = torch.compile(plain, fullgraph=True)
    for lengths in (LENGTHS, OTHERS[0]):
        assert_same(module, kind, [rows(lengths)], run, plain)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_several_results_makes_a_batch(kind: str):
    """Queries, keys and values of one projection, split by hand."""

    def run(module: nn.Module, x: Any) -> Any:
        y = module(x)
        q, k, v = (y.values if kind == "nested" else y.data).chunk(3, -1)
        q, k, v = [x.with_values(t) if kind == "nested" else x.with_data(t) for t in (q, k, v)]
        return q * k + v

    def ref(module: nn.Module, x: Tensor) -> Tensor:
        q, k, v = module(x).chunk(3, -1)
        return q * k + v

    module, counter = nn.Linear(SIZE, 3 * SIZE), Counter()
    for lengths in (LENGTHS, *OTHERS):
        assert_same(module, kind, [rows(lengths)], compiled(run, counter), ref)
    assert counter.graphs == 1


@pytest.mark.cases(1, 0)
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_result_of_a_graph_goes_into_another(kind: str):
    """Sizes stay dynamic on the way: one graph for each function, whatever comes."""
    module, counters = MODULES["mlp"](), [Counter("eager") for _ in range(3)]
    project, square, total = [
        torch.compile(fn, fullgraph=True, backend=counter)
        for fn, counter in zip((module, torch.square, lambda x: x.sum(1)), counters, strict=True)
    ]
    for lengths in (LENGTHS, *OTHERS):
        x = rows(lengths)
        got = total(square(project(build(x, kind, torch.Tensor.detach)) + 1))
        assert is_close(got, torch.stack([(module(row) + 1).square().sum(0) for row in x.rows]))
    assert [counter.graphs for counter in counters] == [1, 1, 1]


ENSEMBLES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, SIZE)), plain),
    "mha": (mha, attend),
}


def ensemble(name: str) -> tuple[list[nn.Module], Callable[..., Any]]:
    """Members, and the gradient and value of all of them for one batch; the members are mapped, the batch is common."""
    members = [ENSEMBLES[name][0]() for _ in range(3)]

    def loss(p: dict[str, Tensor], batch: Any) -> Tensor:
        out = functional_call(members[0], p, (batch,) * (1 if name == "mlp" else 3))
        return (out if name == "mlp" else out[0]).square().sum()

    params = {key: p.detach() for key, p in stack_module_state(members)[0].items()}
    step = tdc.vmap(grad_and_value(loss), in_dims=(0, None))
    return members, lambda batch: step(params, batch)


def assert_ensemble(name: str, members: list[nn.Module], x: Ragged, grads: Any, values: Tensor) -> None:
    """Each member as on its own, example by example."""
    for i, member in enumerate(members):
        want = torch.stack([ENSEMBLES[name][1](member, row.detach()).square().sum() for row in x.rows]).sum()
        assert torch.allclose(values[i], want, rtol=1e-4)
        found = torch.autograd.grad(want, list(member.parameters()))
        for (key, _), g in zip(member.named_parameters(), found, strict=True):
            assert torch.allclose(grads[key][i], g, rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensemble_over_one_batch(name: str):
    members, step = ensemble(name)
    assert_ensemble(name, members, rows(), *step(build(rows(), "nested", torch.Tensor.detach)))


MASK = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(2))
ONE_HEAD: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Any]]]] = {
    "whole": ({}, lambda i, n: {}),
    "causal": ({"is_causal": True, "scale": 0.3}, lambda i, n: {"is_causal": True, "scale": 0.3}),
    "mask": ({"attn_mask": MASK[0]}, lambda i, n: {"attn_mask": MASK[0, :n, :n]}),
    "mask of each": ({"attn_mask": MASK}, lambda i, n: {"attn_mask": MASK[i, :n, :n]}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONE_HEAD)
def test_attention_without_a_dim_of_heads(name: str, kind: str):
    """(B, -1, D) and values of another size, as torch takes (B, L, D)."""
    options, of_row = ONE_HEAD[name]
    given = zip(range(len(LENGTHS)), LENGTHS, strict=True)

    def run(module: nn.Module, x: Any) -> Any:
        how = options if not isinstance(x, Tensor) else of_row(*next(given))
        return nn.functional.scaled_dot_product_attention(x, x, module(x), **how)

    assert_same(nn.Linear(SIZE, 3), kind, [rows()], run)
