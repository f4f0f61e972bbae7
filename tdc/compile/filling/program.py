"""A compiled function that fills its batches up to a few sizes, and runs one graph of fixed sizes for each.

    x (5, D), offsets (3,)   ->   a graph for 8 and 3   ->   results of 5, without the filling

Dynamo and AOTAutograd trace once, with a symbol for each size that varies. `Program` chooses the sizes of a call,
`Graph` takes the filling out of the computation, and Inductor, or another backend, compiles that for these sizes alone,
so that it may record a CUDA graph.

Filling repeats the last entry, so offsets stay offsets, and finite values finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.filled import at_sizes, in_operators, owners_of
from tdc.compile._torch.inductor import kernels_generated
from tdc.compile.filling import places, shapes, sums  # noqa: F401  # their import fills `RULES`
from tdc.compile.filling.run import Graph
from tdc.compile.filling.sizes import Buckets, Fixed
from tdc.compile.filling.values import Expr, evaluate, expression, refuse

logger = logging.getLogger("tdc")
KINDS = {  # by field of a ragged batch, and what its size has beyond the symbol
    ("offsets", 0): "ends", ("offsets", 1): "rows", ("shapes", 0): "rows", ("_values", 0): "totals",
    ("extent", 0): "lengths", ("_lengths", 0): "rows", ("_data", 0): "lengths",
}  # fmt: skip
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
        nodes = module.graph.nodes
        self.filling, self.module = filling, module
        self.inputs = [n.meta["val"] for n in nodes if n.op == "placeholder"]
        made: Any = next(n for n in nodes if n.op == "output").args[0]
        self.outputs = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in made]
        self.places: dict[Expr, tuple[int, int | None]] = {}  # of each symbol an input, and its dim if it is a tensor
        self.kinds: dict[Expr, str] = {}
        for i, val in enumerate(self.inputs):
            given: Any = val.shape if isinstance(val, Tensor) else ()
            for d, n in [(None, val)] if isinstance(val, torch.SymInt) else enumerate(given):
                expr = expression(n)
                if getattr(expr, "is_Symbol", False):
                    self.places.setdefault(expr, (i, d))
                    self.kinds[expr] = kind_of(expr, owners_of(n))
        self.device = next((val.device for val in self.inputs if varies(val)), torch.device("cpu"))
        self.graphs: list[tuple[Fixed, Callable[..., Any]]] = []

    def __call__(self, args: list[Any]) -> list[Any]:
        real = {expr: args[i] if d is None else args[i].shape[d] for expr, (i, d) in self.places.items()}
        with torch.no_grad():
            found, run = self.graph_for(real, args)
            tensors = [self.filled(x, val, found.sizes) for x, val in zip(args, self.inputs, strict=True)]
            args.clear()
            given = [x for x in tensors if x is not None]
            del tensors
            outs = run(self.numbers(found, real), *given)
            self.count(real, found)
            return [self.cut(x, val, real) for x, val in zip(outs, self.outputs, strict=True)]

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
        example = [self.filled(x, val, wanted.sizes) for x, val in zip(args, given, strict=True)]
        present = [x for x in example if x is not None]
        if any([x is None and isinstance(val, Tensor) for x, val in zip(example, given, strict=True)]):
            raise refuse("an operation with an effect, such as a check of torch.linalg")
        numbers = self.numbers(wanted, wanted.sizes)

        def run(numbers: Tensor, *tensors: Tensor) -> list[Any]:
            real, rest = dict(zip(filled, numbers.unbind(), strict=False)), iter(tensors)
            graph = Graph(module, wanted.sizes, real)
            return graph([graph.size(val) if x is None else next(rest) for x, val in zip(example, given, strict=True)])

        before = kernels_generated()
        found = at_sizes(run, [numbers, *present], self.filling.inner)
        self.filling.kernels += kernels_generated() - before
        named = {str(e): n for e, n in wanted.sizes.items()}
        self.filling.recorded.append(named)
        logger.info("tdc: %s: graph %d for sizes %s", self.filling.name, len(self.filling.recorded), named)
        return found

    def numbers(self, fixed: Fixed, real: dict[Expr, int]) -> Tensor:
        """Real sizes of what is filled, on the device of what varies."""
        found = torch.tensor([real[expr] for expr in fixed.filled], dtype=torch.int64)
        return found.to(self.device, non_blocking=True)

    def filled(self, x: Any, val: Any, sizes: dict[Expr, int]) -> Tensor | None:
        """A tensor filled up to the sizes of a graph, by its last entry; None of a number."""
        if not isinstance(x, Tensor):
            return None
        shape = [evaluate(expression(n), sizes) for n in val.shape] if varies(val) else x.shape
        if tuple(shape) == tuple(x.shape):
            return x
        if x.numel() == 0:
            return x.new_zeros(shape)
        for d, n in enumerate(shape):
            more = n - x.shape[d]
            if more:
                last = x.narrow(d, x.shape[d] - 1, 1)
                x = torch.cat([x, last.expand([more if k == d else m for k, m in enumerate(x.shape)])], d)
        return x

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
        return out.copy_(x[tuple([slice(n) for n in shape])])

    def count(self, real: dict[Expr, int], found: Fixed) -> None:
        """Count packed elements, and filling."""
        for expr, n in real.items():
            if self.kinds[expr] == "totals":
                self.filling.real += n
                self.filling.full += found.sizes[expr]


def varies(val: Any) -> bool:
    """True for a traced tensor whose sizes are not all numbers."""
    return isinstance(val, Tensor) and any([not isinstance(n, int) for n in val.shape])


def kind_of(symbol: Expr, owners: Sequence[tuple[str, int, Expr]]) -> str:
    """Kind of a symbol by the fields of ragged batches that have it as a size; empty for any other."""
    found = {KINDS.get((name, size - symbol), "") for name, dim, size in owners if (name, dim) != ("_data", 0)}
    return found.pop() if len(found) == 1 else ""
