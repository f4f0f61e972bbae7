"""The operations and modules that ragged libraries are compared by: 64 rows, right or not, eager and compiled.

    python tests/nested_rows.py             # the score
    python tests/nested_rows.py --rows max  # of some rows, with the text of failures

A row is right in a mode if values, and gradients where the mode has them, are those of a loop over examples, for five
batches of different lengths, the last of another batch size; and, compiled, if all of them were one graph.

    eager       values and gradients
    compiled    values under no_grad, fullgraph, aot_eager
    train       values and gradients of the compiled function

One row (argmax) has no gradient, so 63 count in "train". Two batches are multiplied by `torch.matmul`, which is the
form for compiled functions: torch cannot trace `@` between two objects.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import NestedTensor
from tdc.compile import counted
from tdc.testing.batches import by_how_much, is_close

D = 8
BATCHES = ((3, 2, 5, 4), (4, 4, 4, 4), (2, 7, 3, 6), (9, 2, 2, 3), (5, 2, 6))
MODES = ("eager", "compiled", "train")


@dataclass(frozen=True)
class Row:
    """One operation, written once for batches and examples.

    Args:
        name: as in the comparison.
        run: `run(module, d, *operands)`; `d` is the ragged dim: 1 of a batch, 0 of an example.
        operands: names of `OPERANDS`.
        module: what it runs with, made once.
        ref: of one example, `run` itself by default; with `whole`, of the lists of all examples.
        whole: the result is of the whole batch.
        differentiable: it has a gradient.
    """

    name: str
    run: Callable[..., Any]
    operands: tuple[str, ...] = ("x",)
    module: Callable[[], Any] = lambda: None
    ref: Callable[..., Any] | None = None
    whole: bool = False
    differentiable: bool = True

    def expected(self, module: Any, lists: list[list[Tensor]]) -> list[Tensor]:
        """What a loop over examples gives, in the order of `parts`."""
        ref = self.ref or self.run
        if self.whole:
            return parts(ref(module, *lists), whole=True)
        columns = zip(*[parts(ref(module, 0, *each), whole=True) for each in zip(*lists, strict=True)], strict=True)
        return [t for column in columns for t in column]


def parts(x: Any, whole: bool) -> list[Tensor]:
    """The tensors of a result: rows of ragged batches, and of dense ones where each stands for an example."""
    if isinstance(x, (tuple, list)):
        return [t for part in x for t in parts(part, whole)]
    if isinstance(x, NestedTensor):
        return list(x.unbind())
    return [x] if whole else list(x.unbind())


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)


class Residual(nn.Module):
    """Linear, GELU, Linear, LayerNorm, and the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D), nn.LayerNorm(D))

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


def weights(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(*shape))


def heads(x: Any, d: int) -> Any:
    """(B, -1, D) -> (B, 2, -1, D / 2)"""
    return x.unflatten(-1, (2, D // 2)).transpose(d, d + 1)


def attention(causal: bool) -> Callable[..., Any]:
    def run(m: Any, d: int, *qkv: Any) -> Any:
        return F.scaled_dot_product_attention(*[heads(x, d) for x in qkv], is_causal=causal)

    return run


def mask_out(m: Any, xs: list[Tensor]) -> list[Tensor]:
    """Dropout on the packed values: the same random numbers."""
    return list(F.dropout(torch.cat(xs), 0.5).split([len(x) for x in xs]))


def construct(m: Any, d: int, values: Tensor, offsets: Tensor) -> Any:
    """A batch made inside the function."""
    x: Any = NestedTensor(values, offsets)
    return (x * 2).relu()


def at(d: int, index: Any) -> Any:
    """The index of the ragged dim."""
    return (slice(None),) * d + (index,)


ROWS = [
    Row("relu", lambda m, d, x: F.relu(x)),
    Row("gelu", lambda m, d, x: F.gelu(x)),
    Row("exp+neg+sigmoid", lambda m, d, x: torch.sigmoid(-torch.exp(x))),
    Row("clamp", lambda m, d, x: x.clamp(-0.5, 0.5)),
    Row("dropout(train)", lambda m, d, x: F.dropout(x, 0.5), ref=mask_out, whole=True),
    Row("add(nt,nt)", lambda m, d, x, y: x + y, ("x", "y")),
    Row("add(nt,nt2 same lens)", lambda m, d, x, y: x + y, ("x", "other")),
    Row("mul scalar", lambda m, d, x: x * 3.0),
    Row("add bias(D)", lambda m, d, x: x + m, module=weights(D)),
    Row("to(double)", lambda m, d, x: x.to(torch.float64)),
    Row("where", lambda m, d, x, y: torch.where(x > 0, x, y), ("x", "y")),
    Row("masked_fill", lambda m, d, x: x.masked_fill(x > 0.3, 2.0)),
    Row(
        "lerp/addcmul",
        lambda m, d, x, y: torch.addcmul(torch.lerp(x, y, 0.3), x, y, value=0.5),
        ("x", "y"),
    ),
    Row("softmax(-1)", lambda m, d, x: x.softmax(-1)),
    Row("log_softmax(-1)", lambda m, d, x: F.log_softmax(x, -1)),
    Row("softmax(ragged)", lambda m, d, x: x.softmax(d)),
    Row("sum(-1)", lambda m, d, x: x.sum(-1)),
    Row("sum(ragged)", lambda m, d, x: x.sum(d)),
    Row("mean(ragged)", lambda m, d, x: x.mean(d)),
    Row("amax(ragged)", lambda m, d, x: x.amax(d)),
    Row("max(ragged)", lambda m, d, x: tuple(x.max(d))),
    Row("var(-1)", lambda m, d, x: x.var(-1)),
    Row("std(ragged)", lambda m, d, x: x.std(d)),
    Row("sum()", lambda m, d, x: x.sum(), ref=lambda m, xs: torch.cat(xs).sum(), whole=True),
    Row("argmax(-1)", lambda m, d, x: x.argmax(-1), differentiable=False),
    Row("cumsum(ragged)", lambda m, d, x: x.cumsum(d)),
    Row("sort(ragged)", lambda m, d, x: tuple(x.sort(d))),
    Row("topk(-1)", lambda m, d, x: tuple(x.topk(3, -1))),
    Row("layer_norm", lambda m, d, x: F.layer_norm(x, (D,), m), module=weights(D)),
    Row("rms_norm", lambda m, d, x: F.rms_norm(x, (D,), m), module=weights(D)),
    Row("linear", lambda m, d, x: F.linear(x, m), module=weights(5, D)),
    Row("matmul(nt,W)", lambda m, d, x: x @ m, module=weights(D, 5)),
    Row("x^T@x (B,D,D)", lambda m, d, x: torch.matmul(x.transpose(d, d + 1), x)),
    Row("x@x^T (ragged,ragged)", lambda m, d, x: torch.matmul(x, x.transpose(d, d + 1))),
    Row(
        "einsum bld,de->ble",
        lambda m, d, x: torch.einsum("bld,de->ble", x, m),
        module=weights(D, 5),
        ref=lambda m, d, x: torch.einsum("ld,de->le", x, m),
    ),
    Row("embedding", lambda m, d, t: F.embedding(t, m), ("tokens",), weights(5, D)),
    Row("cat(-1)", lambda m, d, x, y: torch.cat([x, y], -1), ("x", "y")),
    Row("cat(batch)", lambda m, d, x, y: torch.cat([x, y], 0), ("x", "y"), ref=lambda m, *xs: xs, whole=True),
    Row("stack(-1)", lambda m, d, x, y: torch.stack([x, y], -1), ("x", "y")),
    Row("chunk(-1)", lambda m, d, x: x.chunk(2, -1)),
    Row("split(-1)", lambda m, d, x: x.split([3, 5], -1)),
    Row("heads view+transpose", lambda m, d, x: heads(x, d)),
    Row("unsqueeze(-1)", lambda m, d, x: x.unsqueeze(-1)),
    Row("flatten(2,3)", lambda m, d, x: x.flatten(d + 1, d + 2), ("deep",)),
    Row("x[:,0] first token", lambda m, d, x: x[at(d, 0)]),
    Row("x[:,1:] slice", lambda m, d, x: x[at(d, slice(1, None))]),
    Row("x[..., :4]", lambda m, d, x: x[..., :4]),
    Row("x[1] batch select", lambda m, d, x: x[1], ref=lambda m, xs: xs[1], whole=True),
    Row("flip(ragged)", lambda m, d, x: x.flip(d)),
    Row("index_select(-1)", lambda m, d, x: x.index_select(-1, torch.tensor([5, 0, 0]))),
    Row(
        "pad->dense",
        lambda m, d, x: x.to_padded().data,
        ref=lambda m, xs: nn.utils.rnn.pad_sequence(xs, batch_first=True),
        whole=True,
    ),
    Row("sdpa", attention(causal=False), ("x", "y", "z")),
    Row("sdpa causal", attention(causal=True), ("x", "y", "z")),
    Row("conv1d", lambda m, d, x: m(x), ("channels",), lambda: nn.Conv1d(D, 5, 3, padding=1)),
    Row("max_pool1d", lambda m, d, x: F.max_pool1d(x, 2), ("channels",)),
    Row(
        "mse_loss",
        lambda m, d, x, y: F.mse_loss(x, y),
        ("x", "y"),
        ref=lambda m, xs, ys: F.mse_loss(torch.cat(xs), torch.cat(ys)),
        whole=True,
    ),
    Row(
        "cross_entropy",
        lambda m, d, x, t: F.cross_entropy(x.transpose(1, 2), t),
        ("x", "tokens"),
        ref=lambda m, xs, ts: F.cross_entropy(torch.cat(xs), torch.cat(ts)),
        whole=True,
    ),
    Row(
        "construct in graph",
        construct,
        ("values", "offsets"),
        ref=lambda m, xs, _: [(x * 2).relu() for x in xs],
        whole=True,
    ),
    Row(
        "MultiheadAttention",
        lambda m, d, x: m(x, x, x, need_weights=False)[0],
        module=lambda: nn.MultiheadAttention(D, 2, batch_first=True),
    ),
    Row("TransformerEncoderLayer(eval)", lambda m, d, x: m(x), module=lambda: encoder_layer().eval()),
    Row("TransformerEncoderLayer(train)", lambda m, d, x: m(x), module=encoder_layer),
    Row("TransformerEncoder x2(eval)", lambda m, d, x: m(x), module=lambda: encoder().eval()),
    Row("TransformerEncoder x2(train)", lambda m, d, x: m(x), module=encoder),
    Row("MLP block", lambda m, d, x: m(x), module=Residual),
]


class Batch:
    """Leaves of one batch, by operand: packed values for tdc, and the same numbers as examples.

    Operands: x, y, z real `(L, D)` of one structure; other, of equal lengths and other offsets; deep `(L, 2, 3)`;
    channels `(D, L)`; tokens `(L,)` of class numbers; values and offsets, the tensors of x.
    """

    def __init__(self, lengths: tuple[int, ...], operands: tuple[str, ...]) -> None:
        self.lengths, self.g = list(lengths), torch.Generator().manual_seed(0)
        self.structure = self.nested(torch.zeros(sum(lengths)))
        self.leaves: list[tuple[Tensor, list[Tensor], int]] = []  # packed, examples, packed dim
        pairs = [self.operand(name) for name in operands]
        self.inputs: list[Any] = [p[0] for p in pairs]
        self.lists: list[list[Tensor]] = [p[1] for p in pairs]

    def nested(self, values: Tensor, dim: int = 0) -> NestedTensor:
        """A batch with offsets of its own."""
        offsets = tdc.offsets_of(torch.tensor(self.lengths))
        return NestedTensor(values, offsets, ragged_dim=dim + 1, max_length=max(self.lengths))

    def operand(self, name: str) -> tuple[Any, list[Tensor]]:
        """As tdc gets it, and its examples."""
        total = sum(self.lengths)
        if name == "tokens":
            ids = torch.randint(0, 5, (total,), generator=self.g)
            return self.structure.with_values(ids), list(ids.split(self.lengths))
        if name == "offsets":
            return self.structure.offsets, [torch.zeros(0) for _ in self.lengths]
        shape, dim = {"deep": ((total, 2, 3), 0), "channels": ((D, total), 1)}.get(name, ((total, D), 0))
        values = torch.randn(shape, generator=self.g).requires_grad_()
        rows = [row.detach().clone().requires_grad_() for row in values.split(self.lengths, dim)]
        self.leaves.append((values, rows, dim))
        own = self.nested(values, dim) if name in ("other", "channels") else self.structure.with_values(values)
        return (own.values if name == "values" else own), rows


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Under cotangents that depend on shapes alone; zeros where nothing flows."""
    g = torch.Generator().manual_seed(1)
    smooth = [t for t in outputs if t.is_floating_point()]
    seeds = [torch.randn(t.shape, generator=g, dtype=t.dtype) for t in smooth]
    found = torch.autograd.grad(smooth, leaves, seeds, allow_unused=True)
    return [torch.zeros_like(leaf) if f is None else f for f, leaf in zip(found, leaves, strict=True)]


def compare(row: Row, module: Any, call: Callable[..., Any], batch: Batch, grad: bool) -> list[str]:
    """What differs from the loop over examples."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        got = parts(call(module, 1, *batch.inputs), row.whole)
    torch.manual_seed(0)
    want = row.expected(module, batch.lists)
    if [t.shape for t in got] != [t.shape for t in want]:
        return [f"shapes {[tuple(t.shape) for t in got]}, not {[tuple(t.shape) for t in want]}"]
    wrong = [
        f"value {i}{by_how_much(a, b)}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if not is_close(a, b)
    ]
    if not grad:
        return wrong
    params = list(module.parameters()) if isinstance(module, nn.Module) else [] if module is None else [module]
    found = gradients(got, [*params, *[packed for packed, _, _ in batch.leaves]])
    truth = gradients(want, [*params, *[r for _, rows, _ in batch.leaves for r in rows]])
    cut = found[: len(params)]
    for g, (_, _, dim) in zip(found[len(params) :], batch.leaves, strict=True):
        cut += g.split(batch.lengths, dim)
    pairs = enumerate(zip(cut, truth, strict=True))
    return wrong + [f"gradient {i}{by_how_much(a, b)}" for i, (a, b) in pairs if not is_close(a, b)]


def check(row: Row, mode: str) -> list[str]:
    """What is wrong with a row in a mode: nothing, if it is right.

    Raises:
        Exception: what the operation raises.
    """
    torch.manual_seed(0)
    module = row.module()
    call = row.run if mode == "eager" else counted(row.run, backend="aot_eager")
    wrong = []
    for lengths in BATCHES:
        batch = Batch(lengths, row.operands)
        differ = compare(row, module, call, batch, mode != "compiled" and row.differentiable)
        wrong += [f"lengths {lengths}: {text}" for text in differ]
    odd = row.name == "max_pool1d" and torch.__version__ < "2.12"  # as in test_conv.py
    if isinstance(call, counted) and call.counts.compiles != 1 + odd:
        wrong.append(f"{call.counts.compiles} graphs for {len(BATCHES)} batches")
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Print the score; the exit status is 1 if a row is not right."""
    parser = argparse.ArgumentParser(description="Score the rows that ragged libraries are compared by.")
    parser.add_argument("--rows", default="", help="regular expression for the names of rows")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    scores = []
    for mode in MODES:
        rows = [row for row in ROWS if re.search(options.rows, row.name) and (row.differentiable or mode != "train")]
        right = 0
        for row in rows:
            torch._dynamo.reset()
            try:
                wrong = check(row, mode)
            except Exception as error:  # whatever a row raises is its score
                wrong = [f"{type(error).__name__}: {str(error).strip()[:600]}"]
            right += not wrong
            for text in wrong[:1]:
                print(f"{mode:9s} {row.name}: {text}".replace("\n", " | "), flush=True)
        scores.append(f"{right}/{len(rows)} {mode}")
    print(", ".join(scores))
    return int(any([s.split("/")[0] != s.split("/")[1].split()[0] for s in scores]))


if __name__ == "__main__":
    sys.exit(main())
