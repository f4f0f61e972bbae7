"""A compiled function that fills its batches up to a few sizes, and runs one graph of fixed sizes for each.

    x (5, D), offsets (3,)   ->   a graph for 8 and 3   ->   results of 5, without the filling

Dynamo and AOTAutograd trace once, with a symbol for each size that varies. `Program` chooses the sizes of a call,
`Graph` takes the filling out of the computation, and Inductor, or another backend, compiles that for these sizes alone,
so that it may record a CUDA graph.

Filling repeats the last entry, so offsets stay offsets, and finite values finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.filled import at_sizes, in_operators, is_of_data, owners_of
from tdc.compile._torch.inductor import kernels_generated
from tdc.compile.filling import (  # noqa: F401  # their import fills `RULES`
    images,
    loops,
    matrices,
    operators,
    order,
    places,
    shapes,
    sums,
)  # fmt: skip
from tdc.compile.filling.bounds import holds
from tdc.compile.filling.data_sizes import bounds_of, checks_of, split
from tdc.compile.filling.run import Graph
from tdc.compile.filling.sizes import Buckets, Fixed
from tdc.compile.filling.values import OP, Expr, evaluate, expression, refuse, shapes_in
from tdc.core.errors import ShapeError, message

logger = logging.getLogger("tdc")
KINDS = {  # by field of a ragged batch, and what its size has beyond the symbol
    ("offsets", 0): "ends", ("offsets", 1): "rows", ("shapes", 0): "rows", ("_values", 0): "totals",
    ("extent", 0): "lengths", ("_lengths", 0): "rows", ("_data", 0): "lengths",
}  # fmt: skip
OF_DATA = ("data", "numbers")
Inner = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


class Filling:
    """A backend of `torch.compile` that fills batches.

    Attributes:
        recorded: sizes of each graph, in the order in which they were recorded.
        real, full: packed elements of all calls, without and with filling.
    """

    def __init__(self, inner: Inner, buckets: Buckets, name: str) -> None:
        self.inner, self.buckets, self.name = inner, buckets, name
        self.recorded: list[dict[str, int]] = []
        self.real = self.full = self.kernels = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return in_operators(graph, inputs, lambda module, _: Program(self, module))


class Program:
    """One graph, forward or backward, at several sizes."""

    def __init__(self, filling: Filling, module: torch.fx.GraphModule) -> None:
        self._boxed_call = True  # AOTAutograd passes one list, to be emptied
        self.filling = filling
        self.first, self.module = split(module)
        nodes = self.module.graph.nodes
        self.sizes, self.bounds = sizes_of(self.module), bounds_of(nodes)
        self.inputs = [n.meta["val"] for n in nodes if n.op == "placeholder"]
        made: Any = next(n for n in nodes if n.op == "output").args[0]
        self.outputs = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in made]
        # Numbers that the graph computes and the host reads at the end.
        own = {symbol for n in numbers_in(self.outputs) for symbol in getattr(n, "free_symbols", ())}
        self.told = [symbol for symbol in self.bounds if symbol in own]
        self.places: dict[Expr, tuple[int, int | None]] = {}  # of each symbol an input, and its dim if it is a tensor
        self.kinds: dict[Expr, str] = {}
        for i, val in enumerate(self.inputs):
            given: Any = val.shape if isinstance(val, Tensor) else ()
            for d, n in [(None, val)] if isinstance(val, torch.SymInt) else enumerate(given):
                expr = expression(n)
                if getattr(expr, "is_Symbol", False):
                    self.places.setdefault(expr, (i, d))
                    self.kinds[expr] = kind_of_data(expr, self.sizes) if is_of_data(n) else kind_of(expr, owners_of(n))
        # Guards have asked the others.
        self.checks = [e for e in checks_of(nodes) if any([self.kinds.get(s) in OF_DATA for s in e.free_symbols])]
        self.device = next((val.device for val in self.inputs if varies(val)), torch.device("cpu"))
        self.graphs: list[tuple[Fixed, Callable[..., Any]]] = []

    def __call__(self, args: list[Any]) -> list[Any]:
        with torch.no_grad():
            given = list(args) if self.first is None else self.first(*args)
            args.clear()
            real = {expr: given[i] if d is None else given[i].shape[d] for expr, (i, d) in self.places.items()}
            if self.first is not None:
                self.check(given, real)
            found, run = self.graph_for(real, given)
            tensors = [self.filled(x, val, found.sizes) for x, val in zip(given, self.inputs, strict=True)]
            given = [x for x in tensors if x is not None]
            del tensors
            outs = run(self.numbers(found, real), *given)
            self.count(real, found)
            if self.told:
                *outs, counts = outs
                real |= dict(zip(self.told, counts.tolist(), strict=True))
            return [self.cut(x, val, real) for x, val in zip(outs, self.outputs, strict=True)]

    def check(self, given: Sequence[Any], real: dict[Expr, int]) -> None:
        """Refuse sizes read from data that are not as the trace has taken them to be."""
        for expr in self.checks:
            if not evaluate(expr, real):
                got = ", ".join(sorted([f"{s} = {real[s]}" for s in expr.free_symbols]))
                raise ShapeError(message(OP, f"sizes from data with {expr}", got))
        for x, val in zip(given, self.inputs, strict=True):
            expected = tuple([evaluate(n, real) for n in shapes_in(val)])
            if isinstance(x, Tensor) and x.shape != expected:
                raise ShapeError(message(OP, f"a tensor of {expected} from data", f"one of {tuple(x.shape)}"))

    def graph_for(self, real: dict[Expr, int], args: Sequence[Any]) -> tuple[Fixed, Callable[..., Any]]:
        """The recorded graph that fits best, or a new one."""
        wanted = self.filling.buckets.choice(real, self.kinds, [known for known, _ in self.graphs])
        for known, run in self.graphs:
            if known is wanted:
                return known, run
        self.graphs.append((wanted, self.record(wanted, args)))
        return self.graphs[-1]

    def record(self, wanted: Fixed, args: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph for some sizes."""
        module, filled, given = self.module, wanted.filled, self.inputs
        full = dict(wanted.sizes)
        for symbol, bound in self.bounds.items():
            full[symbol] = evaluate(bound, full)
        for size in self.sizes:
            if not holds(size, full, {*filled, *self.bounds}):
                raise refuse(f"a size {size}, which shrinks where a batch grows")
        example = [self.filled(x, val, wanted.sizes) for x, val in zip(args, given, strict=True)]
        present = [x for x in example if x is not None]
        if any([x is None and isinstance(val, Tensor) for x, val in zip(example, given, strict=True)]):
            raise refuse("an operation with an effect, such as a check of torch.linalg")
        numbers = self.numbers(wanted, wanted.sizes)

        def run(numbers: Tensor, *tensors: Tensor) -> list[Any]:
            real, rest = dict(zip(filled, numbers.unbind(), strict=False)), iter(tensors)
            graph = Graph(module, full, real)
            outs = graph([graph.size(val) if x is None else next(rest) for x, val in zip(example, given, strict=True)])
            return [*outs, torch.stack([graph.real[symbol] for symbol in self.told])] if self.told else outs

        before = kernels_generated()
        found = at_sizes(run, [numbers, *present], self.filling.inner)
        self.filling.kernels += kernels_generated() - before
        named = {str(e): n for e, n in wanted.sizes.items() if self.kinds[e] != "numbers"}
        self.filling.recorded.append(named)
        logger.info("tdc: %s: graph %d for sizes %s", self.filling.name, len(self.filling.recorded), named)
        return found

    def numbers(self, fixed: Fixed, real: dict[Expr, int]) -> Tensor:
        """Real sizes of what is filled, on the device of what varies."""
        found = torch.tensor([real[expr] for expr in fixed.filled], dtype=torch.int64)
        return found.to(self.device, non_blocking=True)

    def filled(self, x: Any, val: Any, sizes: dict[Expr, int]) -> Tensor | None:
        """A contiguous tensor filled up to the sizes of a graph, by its last entry; None of a number."""
        if not isinstance(x, Tensor):
            return None
        if not varies(val):
            return x
        shape = [evaluate(expression(n), sizes) for n in val.shape]
        if x.numel() == 0:
            return x.new_zeros(shape)
        for d, n in enumerate(shape):
            more = n - x.shape[d]
            if more:
                last = x.narrow(d, x.shape[d] - 1, 1)
                x = torch.cat([x, last.expand([more if k == d else m for k, m in enumerate(x.shape)])], d)
        return x.contiguous()

    def cut(self, x: Any, val: Any, real: dict[Expr, int]) -> Any:
        """A result without filling."""
        if isinstance(val, (torch.SymInt, torch.SymFloat)):
            return evaluate(expression(val), real)
        if not isinstance(val, Tensor):
            return val
        if not varies(val) and not x.is_cuda:
            return x
        shape, strides = [[evaluate(expression(n), real) for n in sizes] for sizes in (val.shape, val.stride())]
        x, begin = x.resolve_conj().resolve_neg(), evaluate(expression(val.storage_offset()), real)
        if not x.is_cuda and (list(x.stride()), x.storage_offset()) == (strides, begin):
            return x.new_empty(0).set_(x.untyped_storage(), begin, shape, strides)  # no view, as AOTAutograd wants it
        # Elsewhere, as a view of an input is; and on a GPU, where the next call of a CUDA graph writes over results.
        end = begin + 1 + sum([max(n - 1, 0) * step for n, step in zip(shape, strides, strict=True)])
        out = x.new_empty(0).set_(x.new_empty(end).untyped_storage(), begin, shape, strides)
        # Elements of an expanded dim are one.
        parts = tuple([slice(n if step else min(n, 1)) for n, step in zip(shape, strides, strict=True)])
        out[parts].copy_(x[parts])
        return out

    def count(self, real: dict[Expr, int], found: Fixed) -> None:
        """Count packed elements, and filling."""
        for expr, n in real.items():
            if self.kinds[expr] == "totals":
                self.filling.real += n
                self.filling.full += found.sizes[expr]


def varies(val: Any) -> bool:
    """True for a traced tensor whose sizes are not all numbers."""
    return isinstance(val, Tensor) and any([not isinstance(n, int) for n in val.shape])


def sizes_of(module: torch.fx.GraphModule) -> set[Expr]:
    """Sizes that vary, of all tensors of a graph and of its branches and loops."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    found = {n for graph in graphs for node in graph.nodes for n in shapes_in(node.meta.get("val"))}
    return {n for n in found if getattr(n, "free_symbols", ())}


def numbers_in(vals: Iterable[Any]) -> list[Expr]:
    """Sizes, strides and numbers among traced values."""
    found = [expression(n) for x in vals if isinstance(x, Tensor) for n in (*x.shape, *x.stride(), x.storage_offset())]
    return [*found, *[expression(x) for x in vals if isinstance(x, (torch.SymInt, torch.SymFloat))]]


def kind_of_data(symbol: Expr, sizes: Iterable[Expr]) -> str:
    """Kind of a symbol that depends on data: a size, or a number that is the size of nothing."""
    return "data" if any([symbol in size.free_symbols for size in sizes]) else "numbers"


def kind_of(symbol: Expr, owners: Sequence[tuple[str, int, Expr]]) -> str:
    """Kind of a symbol by the fields of ragged batches that have it as a size; empty for any other."""
    found = {KINDS.get((name, size - symbol), "") for name, dim, size in owners if (name, dim) != ("_data", 0)}
    return found.pop() if len(found) == 1 else ""
