"""Loops along a dim: scan, associative_scan and scan_map; see `control_flow`.

`Steps` takes `xs` apart once: the tensors with the steps in front, and the form of a slice. Eager code indexes them in
a Python loop; compiled code passes them to torch's operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.tracing import (
    before_operator,
    loop_operator,
    refuse_in_scan,
    scan_copies_gradients,
    trace_outside,
)
from tdc.compile.carries import Form, agree, apart, lines, moving, replaced, rowwise, split, tensors_of
from tdc.compile.upstream import Code, anchored, copied, needs_grad, own_gradients, tied, traced
from tdc.core import pytree
from tdc.core.arguments import expect_function, expect_number, normal_dim
from tdc.core.container import Container, dims_of
from tdc.core.errors import ShapeError, StructureError, UnsupportedError, describe, message

Fn = Callable[..., Any]

RAGGED = "scan x.to_padded().data.movedim(1, 0) with its mask as another of xs, or keep the batch in the carry"
STACK = "return x.values, and rebuild with x.with_values(values) behind the loop"


class Steps:
    """Operands of a loop: tensors with their T steps in front, and the form of a slice."""

    def __init__(self, op: str, xs: Any, dim: int, reverse: bool = False) -> None:
        expect_number(op, dim, whole=True)
        rowwise(op, "xs", xs, RAGGED)
        tensors, form = split(op, "xs", xs)
        if not tensors:
            hint = "a loop without xs is tdc.while_loop"
            raise ShapeError(message(op, "at least one tensor in xs", "none", hint=hint))
        dims = axes(op, xs, dim)
        self.dim = dims[0]
        self.tensors = [x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        self.form: Form = form
        self.length = self.tensors[0].shape[0]
        self.reverse = reverse
        if any([x.shape[0] != self.length for x in self.tensors]):
            hint = "cut them to one length; pad with x.to_padded() where rows end early"
            raise ShapeError(message(op, f"xs of one length at dim {dim}", "different lengths", lines(xs), hint))
        if self.length == 0:
            raise ShapeError(message(op, f"at least one step at dim {dim} of xs", "0", hint="skip the loop"))

    def at(self, i: int) -> Any:
        """Slice i."""
        return self.form.join([x.select(0, i) for x in self.tensors])

    def order(self) -> Sequence[int]:
        """Steps in the order of the walk."""
        steps = range(self.length)
        return steps[::-1] if self.reverse else steps


def axes(op: str, xs: Any, dim: int) -> list[int]:
    """Dim of the steps of each tensor leaf; of a TensorDict it counts batch dims."""
    out: list[int] = []
    for x in pytree.tree_leaves(xs, is_leaf=lambda x: isinstance(x, Container)):
        if isinstance(x, (Container, Tensor)):
            count = len([t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)])
            out += [normal_dim(dim, dims_of(x), op)] * count
    return out


def stacked(ys: Sequence[Any], form: Form, dim: int) -> Any:
    """Results with their steps at `dim`; the form of one step joins a batch of them, since it holds no sizes."""

    def moved(y: Any) -> Any:
        moves = bool(dim) and isinstance(y, (Tensor, Container)) and dim < dims_of(y)
        return torch.movedim(y, 0, dim) if moves else y  # type: ignore[arg-type]  # it dispatches

    return pytree.tree_map(moved, form.join(ys), is_leaf=lambda y: isinstance(y, Container))


def scan(combine_fn: Fn, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> tuple[Any, Any]:
    """Walk along a dim of `xs`: `carry, y = combine_fn(carry, x)`, and all `y` stacked.

    Shapes:
        xs: every tensor and TensorDict has T steps at `dim`, counted on the batch dims of a TensorDict. Results are
            stacked along `dim`; a TensorDict `y` of batch size `[B]` becomes `[T, B]`.

    Args:
        combine_fn: a pure function of carry and slice; it may close over anything.
        init: the first carry, any pytree.
        xs: a pytree of tensors and TensorDicts.
        reverse: walk from the last step to the first; results keep the place of their step.

    Returns:
        The last carry, and the stacked results.

    Raises:
        DtypeError: a leaf that is no tensor.
        ShapeError: no steps, different numbers of them, or a missing dim.
        StructureError: `combine_fn` does not return a pair, or changes the form of the carry.
        UnsupportedError: a ragged or padded batch in `xs` or among the results; the hint has the alternative.

    Compile:
        fullgraph, one graph for any number of steps; differentiable, integers in the carry included.

    Example:
        >>> from tdc import TensorDict
        >>> xs = TensorDict({"r": torch.tensor([1.0, 2.0, 3.0])}, [3])
        >>> total, ys = scan(lambda c, x: (c + x["r"], x * 10), torch.tensor(0.0), xs)
        >>> total, ys["r"]
        (tensor(6.), tensor([10., 20., 30.]))

    Source:
        `torch._higher_order_ops.scan`.
    """
    expect_function("scan", combine_fn)
    steps = Steps("scan", xs, dim, reverse)
    tensors, form = split("scan", "init", init, numbers=False)
    if not traced():
        carry, ys = walk(combine_fn, init, steps)
        return apart(carry, [*tensors, *steps.tensors]), ys
    before_operator("scan")
    traced_pair = pair(init, trace_outside(combine_fn, init, steps.at(0)))
    carry, ys = scan_in_graph(combine_fn, traced_pair, steps, tensors, form)
    return apart(carry, tensors), ys


def scan_in_graph(
    combine_fn: Fn, traced_pair: tuple[Any, Any], steps: Steps, tensors: list[Tensor], form: Form
) -> tuple[Any, Any]:
    """Run the loop as one operation of a graph, from a carry of `tensors` and `form`.

    `traced_pair` is the result of `combine_fn` outside of it.
    """
    carry, y = traced_pair
    after, _ = split("scan", "the carry", carry, numbers=False)
    outs, out_form = split("scan", "the results", y)
    positions = moving(tensors, after)
    ref = needs_grad(tensors, steps.tensors, after, outs)
    refuse_in_scan("scan", ref)
    code, code_y = Code(ref, [tensors[i] for i in positions]), Code(ref, outs)

    def carry_of(flat: Sequence[Tensor]) -> Any:
        return form.join(replaced(tensors, positions, code.decode(flat)))

    ties = ref is not None and not scan_copies_gradients()
    code_x, learns = Code(ref, steps.tensors), [x.requires_grad for x in steps.tensors]
    given = [anchored(x, ref) for x in code_x.encode(steps.tensors, 1)] if ties else steps.tensors

    def step(flat: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        read = code_x.decode([x if g else x.detach() for x, g in zip(slices, learns, strict=True)]) if ties else slices
        carry, y = combine_fn(carry_of(flat[: len(positions)]), steps.form.join(read))
        now = tensors_of(carry)
        moved = [*code.encode([now[i] for i in positions]), *[x + 1 for x in flat[len(positions) :]]]
        moved[0] = tied(moved[0], [*flat, *slices]) if ties else moved[0]
        ys = code_y.encode(tensors_of(y))
        return moved, ys if ys or ref is not None else [torch.zeros(())]  # Inductor of torch 2.13 wants a result

    start = [anchored(x, ref) for x in code.encode([tensors[i] for i in positions])]
    start += [] if positions else [anchored(torch.zeros(()), ref)]  # torch wants a carry
    end, ys = loop_operator("scan")(step, start, given, dim=0, reverse=steps.reverse)
    return carry_of(own_gradients(end[: len(positions)], ref)), stacked(
        code_y.decode(ys[: len(outs)], 1), out_form, steps.dim
    )


def walk(combine_fn: Fn, init: Any, steps: Steps) -> tuple[Any, Any]:
    """The loop in Python."""
    carry, ys = init, []
    for i in steps.order():
        carry, y = pair(carry, combine_fn(carry, steps.at(i)))
        ys.append(y)
    return carry, together("scan", ys[::-1] if steps.reverse else ys, steps.dim)


def together(op: str, ys: Sequence[Any], dim: int) -> Any:
    """Results of the steps of a Python loop, stacked."""
    for y in ys[1:]:
        agree(op, ("the first result", ys[0]), ("a later one", y), "return the same keys and shapes at each step")
    parts = [split(op, "the results", y) for y in ys]
    return stacked([torch.stack(leaves) for leaves in zip(*[p[0] for p in parts], strict=True)], parts[0][1], dim)


def pair(carry: Any, out: Any) -> tuple[Any, Any]:
    """Return carry and result of a step; refuse a carry of another form, and ragged or padded results."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else describe(out)
        raise StructureError(message("scan", "a pair (carry, y) from combine_fn", got, hint="return carry, None"))
    agree("scan", ("the carry", carry), ("the carry of combine_fn", out[0]), "keep keys, dtypes and shapes")
    rowwise("scan", "the results", out[1], STACK)
    return out[0], out[1]


def associative_scan(combine_fn: Fn, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """All partial results of an associative function along a dim: `x0, f(x0, x1), f(f(x0, x1), x2), …`.

    Shapes:
        xs as for `scan`; the result has the form and the shapes of xs.

    Args:
        combine_fn: `(x, x) -> x`, pure and associative, on slices without `dim`.
        combine_mode: "generic" for any function on any device; "pointwise" for pointwise functions on CUDA.

    Raises:
        As `scan`, and UnsupportedError for "pointwise" elsewhere than on CUDA.

    Compile:
        fullgraph, O(log T) rounds; "generic" is differentiable.

    Example:
        >>> associative_scan(torch.add, torch.tensor([1, 2, 3]), 0, combine_mode="generic")
        tensor([1, 3, 6])

    Source:
        `torch._higher_order_ops.associative_scan`.
    """
    op = "associative_scan"
    expect_function(op, combine_fn)
    steps = Steps(op, xs, dim, reverse)
    if not isinstance(combine_mode, str) or combine_mode not in ("pointwise", "generic"):
        got = repr(combine_mode) if isinstance(combine_mode, str) else describe(combine_mode)
        hint = "'generic' takes any function, on any device"
        raise StructureError(message(op, "combine_mode 'pointwise' or 'generic'", got, hint=hint))
    if combine_mode == "pointwise" and not all([x.is_cuda for x in steps.tensors]):
        hint = 'combine_mode="generic"'
        raise UnsupportedError(message(op, "tensors on CUDA for combine_mode='pointwise'", "others", hint=hint))
    if not traced():
        found: list[Any] = []
        for i in steps.order():
            found.append(combined(combine_fn, found[-1], steps.at(i)) if found else steps.at(i))
        return together(op, found[::-1] if reverse else found, steps.dim)
    if combine_mode == "pointwise":
        before_operator(op)
    trace_outside(combined, combine_fn, steps.at(0), steps.at(0))

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return [copied(x) for x in tensors_of(combine_fn(steps.form.join(a), steps.form.join(b)))]

    out = loop_operator(op)(combine, steps.tensors, 0, reverse=reverse, combine_mode=combine_mode)
    return stacked(out, steps.form, steps.dim)


def combined(combine_fn: Fn, a: Any, b: Any) -> Any:
    """`combine_fn(a, b)`, checked against the form of its arguments."""
    out = combine_fn(a, b)
    agree("associative_scan", ("a slice of xs", a), ("the result of combine_fn", out), "keep keys, dtypes and shapes")
    return out


def scan_map(f: Fn, xs: Any, *args: Any) -> Any:
    """Stack `f(x, *args)` of each step along the first dim of `xs`: a loop, with less memory than `vmap`.

    Shapes:
        xs as for `scan` with `dim=0`.

    Args:
        f: a pure function of a slice; it may close over anything.
        args: the same in each call.

    Raises:
        As `scan`.

    Compile:
        fullgraph; differentiable.

    Example:
        >>> scan_map(lambda x, k: x * k, torch.arange(3), 2)
        tensor([0, 2, 4])

    Source:
        `torch._higher_order_ops.map`. (`tdc.map` works on parts of a TensorDict, one after another.)
    """
    op = "scan_map"
    expect_function(op, f)
    steps = Steps(op, xs, 0)
    if not traced():
        ys = [f(steps.at(i), *args) for i in steps.order()]
        rowwise(op, "the results", ys[0], STACK)
        return together(op, ys, 0)
    before_operator(op)
    y = trace_outside(f, steps.at(0), *args)
    rowwise(op, "the results", y, STACK)
    outs, form = split(op, "the results", y)
    code = Code(needs_grad(outs), outs)

    def step(slices: list[Tensor]) -> list[Tensor]:
        return code.encode(tensors_of(f(steps.form.join(slices), *args)))

    return stacked(code.decode(loop_operator("map")(step, steps.tensors), 1), form, 0)
