"""Operations on a TwoLevelTensor equal those on each sentence alone: values and gradients, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor, nn
from torch.testing import assert_close
from two_levels import LENGTHS, OTHERS, batch, documents, nested, same, same_rows

import tdc
from tdc.core.rules import DISPATCH
from tdc.core.signatures import forms_of
from tdc.ops.two_level import NESTED_RULES, PICKING, TWO_LEVEL_RULES

torch.manual_seed(0)
LINEAR, NORM, WEIGHT = nn.Linear(4, 3).double(), nn.LayerNorm(4).double(), torch.randn(4).double()
MATRIX = torch.randn(4, 3).double()

# -- of each sentence alone: an operation, and what it is on one sentence (L, 4)
SENTENCES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu, torch.relu),
    "method": (lambda x: x.sigmoid(), torch.sigmoid),
    "scalar": (lambda x: 2 - x * 3, lambda s: 2 - s * 3),
    "both": (lambda x: x * x.exp() + x, lambda s: s * s.exp() + s),
    "features": (lambda x: x * WEIGHT, lambda s: s * WEIGHT),
    "ones": (lambda x: x + WEIGHT.view(1, 1, 1, 4), lambda s: s + WEIGHT),
    "where": (lambda x: torch.where(x > 0, x, -x), torch.abs),
    "clamp": (lambda x: x.clamp(min=0.5), lambda s: s.clamp(min=0.5)),
    "float": (lambda x: x.float().double(), lambda s: s.float().double()),
    "linear": (LINEAR, LINEAR),
    "layer_norm": (NORM, NORM),
    "sequential": (nn.Sequential(LINEAR, nn.GELU()), lambda s: F.gelu(LINEAR(s))),
    "glu": (F.glu, F.glu),
    "softmax features": (lambda x: x.softmax(-1), lambda s: s.softmax(-1)),
    "softmax tokens": (lambda x: torch.softmax(x, 2), lambda s: s.softmax(0)),
    "log_softmax": (lambda x: F.log_softmax(x, dim=-2), lambda s: s.log_softmax(0)),
    "normalize": (lambda x: F.normalize(x, dim=2), lambda s: F.normalize(s, dim=0)),
    "normalize features": (lambda x: F.normalize(x, dim=-1), lambda s: F.normalize(s, dim=-1)),
    "cumsum": (lambda x: x.cumsum(2), lambda s: s.cumsum(0)),
    "zeros_like": (lambda x: torch.zeros_like(x) + x, lambda s: s),
    "centred": (lambda x: x - x.mean(2, keepdim=True), lambda s: s - s.mean(0, keepdim=True)),
    "flatten features": (lambda x: x.unflatten(3, (2, 2)).flatten(3), lambda s: s),
    "cat features": (lambda x: torch.cat([x, x], -1), lambda s: torch.cat([s, s], -1)),
    "cat tokens": (lambda x: torch.cat([x, 2 * x], 2), lambda s: torch.cat([s, 2 * s])),
    "stack": (lambda x: torch.stack([x, 2 * x], 3), lambda s: torch.stack([s, 2 * s], 1)),
    "unsqueeze": (lambda x: x.unsqueeze(2) + x.unsqueeze(2), lambda s: 2 * s[None]),
    "squeeze": (lambda x: x.unsqueeze(-1).exp().squeeze(-1), torch.exp),
    "narrow": (lambda x: x.narrow(3, 1, 2), lambda s: s[:, 1:3]),
    "levels and back": (lambda x: (x.flatten(1, 2) * 2).unflatten(1, x), lambda s: s * 2),
    "by lengths": (lambda x: x.flatten(1, 2).unflatten(1, x.inner_lengths), lambda s: s),
    "padded": (lambda x: tdc.nested_like(x.to_padded(float("nan")).data * 2, x), lambda s: s * 2),
    "sort": (lambda x: x.sort(2, descending=True)[0], lambda s: s.sort(0, descending=True)[0]),
    "sort features": (lambda x: x.sort()[1], lambda s: s.sort()[1]),
    "argsort": (lambda x: torch.argsort(x, dim=-2), lambda s: s.argsort(0)),
    "topk features": (lambda x: x.topk(2)[0], lambda s: s.topk(2)[0]),
    "cummax": (lambda x: x.cummax(2)[0], lambda s: s.cummax(0)[0]),
    "max of two": (lambda x: x.max(x * 2), lambda s: torch.max(s, s * 2)),
    "min of two": (lambda x: torch.min(x, other=WEIGHT), lambda s: torch.min(s, WEIGHT)),  # type: ignore[call-overload]  # torch's stub knows tensors
    "weights": (lambda x: torch.matmul(x, MATRIX), lambda s: s @ MATRIX),
    "operator": (lambda x: x @ MATRIX, lambda s: s @ MATRIX),
    "vector": (lambda x: x @ WEIGHT, lambda s: s @ WEIGHT),
    "weights in front": (lambda x: torch.matmul(MATRIX.mT, x.transpose(2, 3)).transpose(2, 3), lambda s: s @ MATRIX),
    "pairs": (lambda x: torch.matmul(x, x.transpose(2, 3)), lambda s: s @ s.mT),
    "attention": (lambda x: torch.matmul(torch.matmul(x, x.transpose(-1, -2)).softmax(-1), x),
                  lambda s: (s @ s.mT).softmax(-1) @ s),
}  # fmt: skip
# -- over the elements of each sentence: (L, 4) to one entry
VECTORS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "sum": (lambda x: x.sum(2), lambda s: s.sum(0)),
    "mean": (lambda x: torch.mean(x, dim=2), lambda s: s.mean(0)),
    "amax": (lambda x: torch.cat([x, x], 2)[x.inner_lengths > 0].amax(-2), lambda s: s.amax(0)),
    "logsumexp": (lambda x: x.logsumexp(2), lambda s: s.logsumexp(0)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 2, 2), lambda s: torch.linalg.vector_norm(s, 2, 0)),
    "norm": (lambda x: x.norm(dim=(2, 3)), lambda s: s.norm()),
    "var_mean": (lambda x: torch.var_mean(x, 2, correction=0)[1], lambda s: s.mean(0)),
    "all": (lambda x: x.sum((2, 3)), lambda s: s.sum()),
    "keepdim": (lambda x: x.sum(2, keepdim=True), lambda s: s.sum(0, keepdim=True)),
    "count": (lambda x: (x > 0).count_nonzero(2), lambda s: (s > 0).count_nonzero(0)),
    "by hand": (lambda x: x.with_values(x.values.sum(1) * 2), lambda s: s.sum(0) * 2),
    "product": (lambda x: torch.matmul(x.transpose(2, 3), x), lambda s: s.mT @ s),
    "pooled": (lambda x: torch.matmul(x[..., 0].softmax(-1), x), lambda s: s[:, 0].softmax(-1) @ s),
    "max": (lambda x: x.max(2)[0], lambda s: s.max(0)[0]),
    "min": (lambda x: torch.min(x, 2, keepdim=True).values, lambda s: s.min(0, keepdim=True)[0]),
    "where max": (lambda x: x.max(dim=-2).indices, lambda s: s.max(0)[1]),
    "argmax": (lambda x: x.argmax(2), lambda s: s.argmax(0)),
    "argmin": (lambda x: x.argmin(2, keepdim=True), lambda s: s.argmin(0, keepdim=True)),
    "topk": (lambda x: x.topk(1, 2)[0], lambda s: s.topk(1, 0)[0]),
    "kthvalue": (lambda x: torch.kthvalue(x, k=1, dim=2)[0], lambda s: s.kthvalue(1, 0)[0]),
    "median": (lambda x: x.median(2).values, lambda s: s.median(0)[0]),
}  # fmt: skip
NONEMPTY = ("amax", "max", "min", "where max", "argmax", "argmin", "topk", "kthvalue", "median")  # of no tokens: none
# -- over all elements of each document
DOCUMENTS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "sum": (lambda x: x.sum((1, 2)), lambda d: d.sum(0)),
    "mean": (lambda x: x.mean((1, 2, 3)), lambda d: d.mean()),
    "keepdim": (lambda x: x.sum((1, 2), keepdim=True), lambda d: d.sum(0)[None, None]),
    "any": (lambda x: (x > 1).any((-3, -2)), lambda d: (d > 1).any(0)),
    "two steps": (lambda x: x.sum(2).sum(1), lambda d: d.sum(0)),
}  # fmt: skip


def loss_of(tensors: list[Any]) -> Tensor:
    """A number that depends on every element in another way."""
    flat = torch.cat([t.double().reshape(-1) for t in tensors])
    flat = torch.where(flat.isfinite(), flat, 0)  # a mean of no tokens is NaN
    return (flat * torch.linspace(1, 2, flat.numel(), dtype=torch.float64)).sum()


def tensors_of(x: Any) -> list[Tensor]:
    while not isinstance(x, Tensor):
        x = x.values
    return [x]


def compiled(fn: Any) -> tuple[Any, Counter]:
    counter = Counter("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter), counter


TABLES: dict[str, dict[str, tuple[Any, Any]]] = {"sentences": SENTENCES, "vectors": VECTORS, "documents": DOCUMENTS}


def check(kind: str, names: list[str], run: Any, lengths: list[list[int]]) -> None:
    """Values of several operations, and the gradient of a loss of them all, are those of the loop."""
    docs = [[s.requires_grad_() for s in document] for document in documents(lengths)]
    x = batch([[s.detach() for s in document] for document in docs]).requires_grad_()
    outs, wanted = run(x), []
    for name, out in zip(names, outs, strict=True):
        ref = TABLES[kind][name][1]
        if kind == "documents":
            want = [ref(torch.cat([*document, torch.zeros(0, 4).double()])) for document in docs]
            assert_close(out, torch.stack(want), equal_nan=True)
            wanted += want
        else:
            each = [[ref(s) for s in document] for document in docs]
            (same if kind == "sentences" else same_rows)(out, each)
            wanted += [s for document in each for s in document]
    if not any(t.requires_grad for t in wanted):
        return
    leaves = [s for document in docs for s in document]
    want = torch.autograd.grad(loss_of(wanted), leaves, materialize_grads=True, allow_unused=True)
    loss_of([t for out in outs for t in tensors_of(out)]).backward()
    assert x.grad is not None
    assert_close(x.grad.values.values, torch.cat(want))


def without_empty(lengths: list[list[int]]) -> list[list[int]]:
    return [[n for n in document if n] for document in lengths]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table])
def test_equals_the_loop(kind: str, name: str):
    torch.manual_seed(0)
    fn = TABLES[kind][name][0]
    for lengths in (LENGTHS, *OTHERS):
        check(kind, [name], lambda x: [fn(x)], without_empty(lengths) if name in NONEMPTY else lengths)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "sentences")) for k in TABLES])
def test_equals_the_loop_in_one_graph(kind: str):
    torch.manual_seed(0)
    names = [name for name in TABLES[kind] if name not in NONEMPTY]
    graph, counter = compiled(lambda x: [TABLES[kind][name][0](x) for name in names])
    for lengths in (LENGTHS, *OTHERS):
        check(kind, names, graph, lengths)
    assert counter.graphs == 1


@pytest.mark.slow
def test_choices_of_tokens_in_one_graph():
    torch.manual_seed(0)
    graph, counter = compiled(lambda x: [VECTORS[name][0](x) for name in NONEMPTY])
    for lengths in (LENGTHS, *OTHERS):
        check("vectors", list(NONEMPTY), graph, without_empty(lengths))
    assert counter.graphs == 1


def test_modules_on_sentences():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
    docs = documents()
    x = batch(docs)
    same(x.with_values(layer(x.values)), [[layer(s[None])[0] for s in document] for document in docs])


def test_one_entry_of_each_sentence_and_document():
    docs, weights, bias = documents(), torch.randn(6).double(), torch.randn(4).double()
    x, each = batch(docs), iter(weights)
    y = x * x.with_values(weights)[:, :, None, None] + bias.view(4, 1, 1, 1)
    same(y, [[s * next(each) + b for s in document] for document, b in zip(docs, bias, strict=True)])


def test_weights_of_each_document_and_sentence():
    docs = documents()
    x: Any = batch(docs)
    weights, own = torch.randn(4, 1, 4, 2).double(), torch.randn(6, 4, 2).double()
    same(x @ weights, [[s @ w[0] for s in document] for document, w in zip(docs, weights, strict=True)])
    each = iter(own)
    same(x @ x.with_values(own), [[s @ next(each) for s in document] for document in docs])


def test_embedding_and_losses():
    functional: Any = F  # whose stubs know tensors only
    torch.manual_seed(0)
    table, ids = nn.Embedding(9, 4), [[torch.randint(0, 9, (n,)) for n in document] for document in LENGTHS]
    empty = tdc.NestedTensor(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    x = tdc.pack([tdc.pack(document) if document else empty for document in ids])
    logits = table(x)
    every = torch.cat([s for document in ids for s in document])
    assert_close(functional.cross_entropy(logits, x % 4), F.cross_entropy(table(every), every % 4))
    assert_close(F.mse_loss(logits, logits * 2), table(every).square().mean())
    same(F.mse_loss(logits, logits * 2, reduction="none"), [[table(s).square() for s in document] for document in ids])


def test_choices_of_documents_and_sentences():
    docs = documents()
    x: Any = batch(docs)
    same(x.index_select(0, torch.tensor([2, 0])), [docs[2], docs[0]])
    same(x.narrow(0, 1, 2), docs[1:3])
    same_rows(x.select(0, 2), docs[2])
    same_rows(x[[0, 3]].select(1, 0), [docs[0][0], docs[3][0]])
    for part, want in zip(x.split(3), (docs[:3], docs[3:]), strict=True):
        same(part, want)
    for part, want in zip(x.chunk(2), (docs[:2], docs[2:]), strict=True):
        same(part, want)
    same(torch.cat([x, x[:2]]), docs + docs[:2])


@pytest.mark.sweep
@pytest.mark.slow
def test_sentences_after_sentences_in_one_graph():
    count = Counter("eager")
    compiled = torch.compile(lambda x, y: torch.cat([x, y, x], 1), fullgraph=True, backend=count)
    for lengths in OTHERS:
        docs, others = documents(lengths), documents([document * 2 for document in lengths])
        want = [a + b + a for a, b in zip(docs, others, strict=True)]
        for run in (lambda x, y: torch.cat([x, y, x], 1), compiled):
            same(run(batch(docs), batch(others)), want)
    assert count.graphs == 1
    leaf = batch(documents()).values.values.requires_grad_()
    x = batch(documents()).with_values(batch(documents()).values.with_values(leaf))
    (grad,) = torch.autograd.grad((torch.cat([x, 2 * x], 1) ** 2).sum(), leaf)
    assert_close(grad, 10 * leaf)


@pytest.mark.sweep
@pytest.mark.slow
def test_indices_in_a_graph():
    def fn(x: Any, rows: Tensor, mask: Tensor) -> Any:
        return x[rows], x[mask], x[:, 1:], x[x.inner_lengths > 1], x[:, :, :1], x[..., 0]

    graph, counter = compiled(fn)
    for lengths in ([[3, 1], [], [2, 0, 4]], [[1], [2, 2], []], [[4, 1], [0, 2], [7, 3]]):
        docs = documents(lengths)
        rows, mask = torch.tensor([2, 0]), torch.tensor([True, False, True])
        out = graph(batch(docs), rows, mask)
        wanted = (
            [docs[2], docs[0]], [docs[0], docs[2]], [d[1:] for d in docs], [[s for s in d if len(s) > 1] for d in docs],
            [[s[:1] for s in d] for d in docs], [[s[:, 0] for s in d] for d in docs],
        )  # fmt: skip
        for x, want in zip(out, wanted, strict=True):
            same(x, want)
    assert counter.graphs == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_packing_in_a_graph():
    graph, counter = compiled(lambda a, b: tdc.pack([a * 2, b]))
    for lengths in ([[3, 1], [2]], [[2, 2, 5], [1, 3, 4]]):
        docs = documents(lengths)
        same(graph(*[nested(d) for d in docs]), [[2 * s for s in docs[0]], docs[1]])
    assert counter.graphs <= 2


class TestRefused:
    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            (lambda x: x.mean(1), tdc.ShapeError, "dims of inner examples"),
            (lambda x: x.sum(0), tdc.ShapeError, "dims of inner examples"),
            (lambda x: F.gumbel_softmax(x, dim=1), tdc.ShapeError, "dims of inner examples"),
            (lambda x: x.softmax(1), tdc.ShapeError, "dims of inner examples"),
            (lambda x: F.softmax(x), tdc.ShapeError, "expected a dim"),
            (lambda x: x.argmax(1), tdc.ShapeError, "dims of inner examples"),
            (lambda x: x + x[:3], tdc.StructureError, "one ragged structure"),
            (lambda x: x + x.values, tdc.StructureError, "an entry for each inner example"),
            (lambda x: x + x.mean(2), tdc.StructureError, r"y.unsqueeze\(2\)"),
            (lambda x: x + x.values.to_padded(), tdc.StructureError, "two levels"),
            (lambda x: x + torch.ones(6, 1, 1).double(), tdc.ShapeError, "broadcasts"),
            (lambda x: x + torch.ones(3, 1, 1, 1).double(), tdc.ShapeError, "1 or 4 rows"),
            (lambda x: x + torch.ones(4, 2, 1, 1).double(), tdc.ShapeError, "broadcasts"),
            (lambda x: F.mse_loss(x, torch.ones(6, 1, 4).double()), tdc.ShapeError, "broadcasts"),
            (lambda x: F.mse_loss(x, x.values), tdc.StructureError, "an entry for each inner example"),
            (lambda x: F.kl_div(x, x, reduction="batchmean"), tdc.UnsupportedError, "another reduction"),
            (lambda x: F.linear(x.values, x), tdc.StructureError, "two levels"),
            (lambda x: x.matmul(x), tdc.ShapeError, "a last dim that meets"),
            (lambda x: x @ x[:3], tdc.StructureError, "one ragged structure"),
            (lambda x: x @ x.values, tdc.StructureError, "an entry for each inner example"),
            (lambda x: x @ torch.ones(4, 4, 2).double(), tdc.ShapeError, "broadcasts"),
            (lambda x: x @ torch.ones(3, 1, 4, 2).double(), tdc.ShapeError, "1 or 4 rows"),
            (lambda x: x.transpose(1, 2), tdc.ShapeError, "two dims of inner examples"),
            (lambda x: x.sort(1), tdc.ShapeError, "dims of inner examples"),
            (lambda x: x.max(0), tdc.ShapeError, "dims of inner examples"),
            (lambda x: x.max((1, 2)), tdc.TdcError, "dim"),
            (lambda x: x.topk(2, 2), tdc.ShapeError, r"x\[x.inner_lengths >= 2\]"),
            (lambda x: torch.max(x.values, x), tdc.DtypeError, "a TwoLevelTensor first"),
            (lambda x: x.quantile(0.5, 2), tdc.MethodError, r"hint: x.with_values\(fn\(x.values\)\)"),
            (lambda x: x.to_padded(length=3), tdc.ShapeError, "length with 2 sizes"),
            (lambda x: x.transpose(2, 3).to_padded(), tdc.ShapeError, "ragged dims right behind dim 1"),
            (lambda x: torch.stack([x, x]), tdc.UnsupportedError, "torch.cat along dim 0 or 1"),
            (lambda x: torch.stack([x, x.values], 2), tdc.StructureError, "operand 1: NestedTensor"),
            (lambda x: x.unsqueeze(1), tdc.UnsupportedError, "a new dim of inner examples"),
            (lambda x: x.squeeze(0), tdc.UnsupportedError, "dims of inner examples"),
            (lambda x: torch.cat([x, x[:2]], 1), tdc.TdcError, "rows"),
            (lambda x: torch.cat([x, x.values]), tdc.StructureError, "operand 1: NestedTensor"),
            (lambda x: x.flatten(), tdc.ShapeError, "neighbouring dims"),
            (lambda x: x.unflatten(1, (2, -1)), tdc.ShapeError, "a dim of inner examples"),
            (lambda x: x.flatten(1, 2).unflatten(1, x[:3]), tdc.ShapeError, "dim 1 of a NestedTensor"),
            (lambda x: x.flatten(1, 2).unflatten(2, x), tdc.ShapeError, "dim 1 of a NestedTensor"),
            (lambda x: x.flatten(1, 2).unflatten(1, x[[2, 1, 0, 3]]), tdc.StructureError, "add up to each example"),
            (lambda x: x.flatten(1, 2).unflatten(1, x.inner_lengths.float()), tdc.DtypeError, "int64 lengths of parts"),
            (lambda x: torch.sum(x.values, x), tdc.DtypeError, "a TwoLevelTensor first"),
            (lambda x: x.unbind(1), tdc.ShapeError, "dim 0, the outer examples"),
            (lambda x: tdc.positions(x), tdc.DtypeError, "a NestedTensor"),
        ],
    )
    def test_names_what_to_do(self, call: Any, error: Any, text: str):
        with pytest.raises(error, match=text):
            call(batch(documents()))

    def test_sentences_that_agree_by_chance(self):
        """As many documents as sentences, all of one token: no operation takes one for the other."""
        functional: Any = F
        x: Any = tdc.pack([tdc.pack([torch.ones(1, 4)]) for _ in range(3)])
        for call in (lambda: x + x.values, lambda: functional.mse_loss(x, x.values), lambda: x + torch.ones(3, 1, 4)):
            with pytest.raises(tdc.TdcError):
                call()


def test_rows_with_a_dim_count_it_anew():
    """A row that hands a dim on as it is would take sentences for tokens."""
    own = {op for op, rule in NESTED_RULES.items() if rule.dims}
    own |= {torch.flatten, torch.cat, torch.stack, torch.unsqueeze, torch.squeeze}
    names = {"dim", "dims", "axis", "dim0", "dim1", "start_dim"}
    taken = {rule.op: {name for form in forms_of(rule.op) for name, _ in form} for rule in TWO_LEVEL_RULES}
    assert not [op for op, found in taken.items() if found & names and op not in own]


def test_drawn_along_tokens():
    x = batch(documents())
    for drawn in (F.gumbel_softmax(x, dim=2), F.gumbel_softmax(x, 1.0, False, 1e-10, 2)):  # type: ignore[arg-type]  # torch's stub knows tensors
        assert_close(drawn.sum(2).values, (x.inner_lengths.values > 0).double()[:, None].expand(-1, 4))
    assert_close(F.gumbel_softmax(x).sum(-1).values.values, torch.ones(15).double())  # type: ignore[arg-type]  # torch's stub knows tensors


def test_results_with_names():
    docs = documents()
    mantissa, exponent = torch.frexp(batch(docs))  # type: ignore[arg-type]  # torch's stub knows tensors
    same(torch.ldexp(mantissa, exponent), docs)


def test_every_row_runs_one_of_a_nested_tensor():
    assert {rule.op for rule in TWO_LEVEL_RULES} <= set(NESTED_RULES)
    assert set(PICKING) <= set(DISPATCH["two_level"])
