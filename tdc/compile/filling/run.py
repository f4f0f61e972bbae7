"""Run a traced graph at the sizes of a bucket, with the results of the real sizes.

Every size of the graph is an expression of symbols. A symbol that is filled has two numbers, the size of the bucket and
the real one; the others have one. An operation runs on tensors of the bucket's sizes. If it keeps elements in place,
what it makes of filling is filling again; if it mixes elements along a filled dim, its row in `RULES` says what stands
in the filling meanwhile. Any other operation is refused by name.

Invariant: along each filled dim the real elements come first, as many as the expression of the dim says.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from tdc.compile._torch.filled import is_of_higher_order, operator_of
from tdc.compile.filling.values import (
    Expr,
    Filled,
    Node,
    Size,
    evaluate,
    expression,
    larger,
    power,
    real,
    refuse,
    smaller,
    whole,
)  # fmt: skip
from tdc.core import pytree
from tdc.core.errors import TdcError

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}  # by name of an operator, with or without its overload
# Results have the numbers of their operands, in other places or of other dtypes, and sizes are those of the bucket.
IN_PLACE = (
    "alias", "clone", "detach", "_to_copy", "permute", "transpose", "t", "unsqueeze", "squeeze", "contiguous", "copy",
    "lift_fresh_copy", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "bernoulli",
    "native_dropout", "zeros", "ones", "empty", "rand", "randn", "empty_strided", "empty_permuted", "new_zeros",
    "new_ones", "new_full", "new_empty", "tril", "triu", "fill", "resolve_conj",
    "view_as_real", "view_as_complex", "complex", "polar", "exponential", "new_empty_strided", "randint_like",
    "uniform", "normal_functional",
)  # fmt: skip
# Checks of sizes, which hold of the real ones: guards and the trace have asked them.
CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_tensor_metadata")
WHOLE = ("SymInt", "int")
ON_TENSORS: dict[Any, Callable[..., Any]] = {  # functions of sizes, of real numbers
    torch.sym_sum: sum, torch.sym_max: larger, torch.sym_min: smaller, torch.sym_float: real,
    operator.truediv: lambda a, b: real(a) / real(b), operator.pow: power,
    math.trunc: whole("trunc"), math.ceil: whole("ceil"), math.floor: whole("floor"),
}  # fmt: skip


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function `(graph, node, *args, **kwargs)` for operators, by their names."""

    def keep(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return keep


class Graph:
    """A traced graph at the sizes of a bucket.

    Attributes:
        full: the number of each symbol in the bucket.
        real: the real number of each symbol that is filled, a tensor without dims.
        numbers: the real numbers of all symbols.
    """

    def __init__(self, module: torch.fx.GraphModule, full: Mapping[Expr, int], real: Mapping[Expr, Tensor]) -> None:
        self.module, self.full, self.real = module, full, dict(real)
        self.numbers: dict[Expr, Any] = {**full, **real}
        self.masks: dict[tuple[Expr, int], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of the real numbers."""
        return next((x.device for x in self.real.values()), torch.device("cpu"))

    def count_here(self, symbol: Expr, real: Tensor) -> None:
        """Fill a symbol, whose real number the graph itself computes."""
        self.real[symbol] = self.numbers[symbol] = real

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run all operations; return outputs with filling, None in the place of numbers."""
        given, found = iter(inputs), dict[Node, Any]()
        for node in self.module.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
            if node.op == "placeholder":
                found[node] = self.wrap(node.meta["val"], next(given))
            elif node.op == "get_attr":
                found[node] = operator.attrgetter(node.target)(self.module)
                if isinstance(found[node], Tensor):
                    found[node] = Filled(found[node], (None,) * found[node].ndim)
            elif node.op == "output":
                return pytree.tree_map(lambda x: x.x if isinstance(x, Filled) else None, args[0])
            else:
                found[node] = self.run(node, args, kwargs)
        raise AssertionError("a graph has an output")

    def run(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The value of one operation. Since it ran at real sizes, an error is due to those of the bucket."""
        try:
            return self.value(node, args, kwargs)
        except TdcError:
            raise
        except (RuntimeError, TypeError) as error:
            raise refuse(f"{node.target} of sizes, or numbers, that vary so") from error

    def value(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The value of one operation."""
        target: Any = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(node.meta.get("val"), torch.SymFloat) and str(target).startswith("aten._local_scalar_dense"):
            return Size(math.nan, args[0].x)
        varies = any([isinstance(x, Size) or (isinstance(x, Filled) and x.dims) for x in values_in(args, kwargs)])
        op = operator_of(target)
        if op is None:
            return self.number(node, args, kwargs, varies)
        found = RULES.get(f"{op.name}.{op.overload}") or RULES.get(op.name)
        if (varies or op.name == "nonzero") and op.space in ("aten", "tdc") and found is not None:
            return self.wrap(node.meta["val"], found(self, node, *args, **kwargs))
        if not varies or op.name in IN_PLACE or torch.Tag.pointwise in target.tags:
            return self.plain(node, args, kwargs)
        if op.name not in CHECKS:
            raise refuse(str(target))
        return None

    def number(self, node: Node, args: Any, kwargs: Any, varies: bool) -> Any:
        """Arithmetic of sizes, by a function of Python; an operator of higher order that no size reaches."""
        target: Any = node.target
        if not varies:
            return self.wrap(node.meta.get("val"), target(*bare(args), **bare(kwargs)))
        if is_of_higher_order(target):
            found = RULES.get(f"higher_order.{target.__name__}")
            if found is None:
                raise refuse(str(target))
            return self.wrap(node.meta.get("val"), found(self, node, *args, **kwargs))
        on_tensors: Any = ON_TENSORS.get(target, target)
        given = chosen(args, "Scalar")
        if any([isinstance(n, float) for n in values_in(given)]):  # else torch's default of fewer digits
            given = pytree.tree_map(real, given)
        return Size(target(*chosen(args, "SymInt")), on_tensors(*given))

    def plain(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The operation itself. A size among its arguments is that of the bucket, a number the real one."""
        target: Any = node.target
        types = getattr(operator_of(target), "arguments", {})
        given = [chosen(x, kind) for x, kind in zip(args, types.values(), strict=False)]
        rest = {name: chosen(x, types[name]) for name, x in kwargs.items()}
        has_tensor = any([isinstance(x, Size) for x in values_in(args, kwargs)])
        out = (target.overloadpacket if has_tensor else target)(*given, **rest)
        return self.wrap(node.meta.get("val"), out)

    def wrap(self, val: Any, out: Any) -> Any:
        """A result with the real sizes of its dims; a value that was traced has them."""
        if isinstance(val, (tuple, list)):
            return tuple([self.wrap(v, x) for v, x in zip(val, out, strict=True)])
        if isinstance(out, Tensor) and isinstance(val, Tensor):
            self.check(val, out)
            sizes = [expression(n) for n in val.shape]
            out = out if out.dtype == val.dtype else out.to(val.dtype)
            return Filled(out, tuple([n if isinstance(self.number_of(n), Tensor) else None for n in sizes]))
        if isinstance(val, torch.SymInt):
            real = self.number_of(expression(val))
            return Size(self.size(val), real) if isinstance(real, Tensor) else real
        return out

    def check(self, val: Tensor, out: Tensor) -> None:
        """Refuse a result whose sizes are not the traced ones in the bucket."""
        expected = self.shape(val)
        if tuple(out.shape) != expected:
            raise refuse(f"a result of {tuple(out.shape)} where {expected} was traced")

    def number_of(self, expr: Expr) -> Any:
        """The real number of an expression: a tensor where it is filled."""
        return evaluate(expr, self.numbers)

    def count(self, x: Filled, dim: int) -> Any:
        """The real size of a dim: a tensor where it is filled."""
        return x.x.shape[dim] if x.sizes[dim] is None else self.number_of(x.sizes[dim])

    def size(self, n: Any) -> int:
        """A size of the trace in the bucket."""
        found: int = evaluate(expression(n), self.full)
        return found

    def shape(self, val: Tensor) -> tuple[int, ...]:
        """Sizes of a traced tensor in the bucket."""
        return tuple([self.size(n) for n in val.shape])

    def valid(self, expr: Expr, full: int) -> Tensor:
        """True on the real positions of a dim, (full,)."""
        key = expr, full
        if key not in self.masks:
            real = self.number_of(expr)
            self.masks[key] = torch.arange(full, device=real.device) < real
        return self.masks[key]

    def mask(self, x: Filled, dims: Sequence[int] | None = None) -> Tensor | None:
        """True on real elements along the filled ones of some dims, to broadcast against x; None if there are none."""
        found, ndim = None, x.x.ndim
        for d in x.dims:
            if dims is None or d in dims:
                one = self.valid(x.sizes[d], x.x.shape[d]).view(*[1] * d, -1, *[1] * (ndim - 1 - d))
                found = one if found is None else found & one
        return found

    def masked(self, x: Filled, value: Any, dims: Sequence[int] | None = None) -> Tensor:
        """A tensor with a value in the filling of some dims."""
        mask = self.mask(x, dims)
        return x.x if mask is None else torch.where(mask, x.x, value)

    def at(self, x: Filled, dim: int, index: Tensor) -> Tensor:
        """Elements at real positions along a filled dim; those of filling may be any."""
        return x.x.index_select(dim, index.clamp(0, max(x.x.shape[dim] - 1, 0)))


def values_in(*trees: Any) -> Iterator[Any]:
    """Leaves of arguments."""
    return chain.from_iterable([pytree.tree_leaves(tree) for tree in trees])


def bare(tree: Any) -> Any:
    """Arguments with plain tensors."""
    return pytree.tree_map(lambda x: x.x if isinstance(x, Filled) else x, tree)


def chosen(x: Any, kind: str) -> Any:
    """An argument of an operator: sizes of the bucket where its type is one of whole numbers, else real numbers."""
    whole = any([word in kind for word in WHOLE])

    def of(v: Any) -> Any:
        if isinstance(v, Size):
            return v.full if whole else v.real
        return v.x if isinstance(v, Filled) else v

    return pytree.tree_map(of, x)
