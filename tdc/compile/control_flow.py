"""Control flow whose operands, carry and results are any pytree of TensorDict, NestedTensor, MaskedBatch, tensorclass.

    tdc.cond(pred, true_fn, false_fn, operands)
    tdc.while_loop(cond_fn, body_fn, carried_inputs)

and in `loops` scan, associative_scan and scan_map. Eager calls are Python: an `if`, a loop. In a graph they are torch's
operators of these names, one node whatever the data, with the same values and gradients (see `upstream`).

Functions must be pure: they are traced once more outside the operator, so that a change of form is found and shown.
No result is an operand: a write into a result changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.tracing import before_operator, refuse_in_scan, trace_outside, while_operator
from tdc.compile.carries import agree, apart, moving, replaced, split, tensors_of
from tdc.compile.counts import EXPLAINED
from tdc.compile.upstream import (
    Code,
    Planes,
    anchored,
    copied,
    ends_if_ran,
    even_gradients,
    needs_grad,
    own_gradients,
    traced,
)
from tdc.core.arguments import expect_function
from tdc.core.dynamo import is_batched
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message

Fn = Callable[..., Any]


def cond(pred: bool | Tensor, true_fn: Fn, false_fn: Fn, operands: Sequence[Any] = ()) -> Any:
    """Return `true_fn(*operands)` where `pred` is True, else `false_fn(*operands)`.

    Args:
        pred: a bool tensor of one element, or a Python bool, on which a compiled function specialises.
        true_fn, false_fn: pure functions whose results agree in keys, dtypes and shapes. They may close over anything.
        operands: their arguments, a tuple.

    Raises:
        DtypeError: `pred` is no bool; a leaf of a result is neither a tensor nor a constant.
        ShapeError: `pred` has several elements.
        StructureError: the branches differ in form (when traced; eager runs one of them).

    Compile:
        fullgraph, one graph for both outcomes; differentiable. Under `vmap` use `torch.where`.

    Example:
        >>> from tdc import TensorDict
        >>> td = TensorDict({"a": torch.ones(2)}, [2])
        >>> out = cond(td["a"].sum() > 0, lambda td: td.set("b", td["a"] * 2), lambda td: td.set("b", -td["a"]), (td,))
        >>> out["b"]
        tensor([2., 2.])

    Source:
        `torch.cond`.
    """
    flag = checked("cond", pred)
    given = arguments("cond", "operands", operands, true_fn, false_fn)
    if not traced():
        return apart(true_fn(*given) if flag else false_fn(*given), tensors_of(given))
    before_operator("cond")
    tensors, form = split("cond", "operands", given)
    yes, no = trace_outside(true_fn, *given), trace_outside(false_fn, *given)
    outs, result = split("cond", "the result of true_fn", yes)
    agree("cond", ("the result of true_fn", yes), ("the result of false_fn", no), "return the same keys from both")
    others = tensors_of(no)
    positions = [i for i, (a, b) in enumerate(zip(outs, others, strict=True)) if a is not b]  # else from outside
    ref = needs_grad(tensors, outs, others)
    code = Code(ref, [outs[i] for i in positions])
    if positions:

        def branch(fn: Fn) -> Fn:
            def run(*flat: Tensor) -> tuple[Tensor, ...]:
                found = tensors_of(fn(*form.join(even_gradients(flat))))
                return tuple(code.encode([found[i] for i in positions]))

            return run

        found = torch.cond(flag, branch(true_fn), branch(false_fn), tuple([x.contiguous() for x in tensors]))
        outs = replaced(outs, positions, own_gradients(code.decode(found), ref))
    joined = result.join(outs)
    return joined if len(positions) == len(outs) else apart(joined, tensors)


def while_loop(cond_fn: Fn, body_fn: Fn, carried_inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Repeat `carry = body_fn(*carry)` while `cond_fn(*carry)` is True.

    Args:
        cond_fn: a pure function of the carry that returns a bool of one element.
        body_fn: a pure function of the carry that returns a tuple of its keys, dtypes and shapes.
        carried_inputs: the first carry, a tuple; count with a tensor, `torch.tensor(0)`.

    Returns:
        The last carry, a tuple.

    Raises:
        DtypeError: a Python number in the carry, or a condition that is no bool.
        ShapeError: a condition of several elements.
        StructureError: `body_fn` changes the number, keys, dtypes or shapes of the carry. In a graph, a condition that
            is the bool True.

    Compile:
        fullgraph, one graph for any number of loops. Differentiable; the backward pass keeps the carry of each step, of
        which only what the body changes counts. A loop inside a loop has no gradient: unroll the inner one.

    Example:
        >>> body = lambda n, x: (n + 1, x / 2)
        >>> while_loop(lambda n, x: x.norm() > 1, body, (torch.tensor(0), torch.tensor([8.0])))
        (tensor(3), tensor([1.]))

    Source:
        `torch.while_loop`.
    """
    carry = arguments("while_loop", "carried_inputs", carried_inputs, cond_fn, body_fn)
    tensors, form = split("while_loop", "the carry", carry, numbers=False)
    if not traced():
        while checked("while_loop", cond_fn(*carry)):
            carry = after_body(carry, body_fn(*carry))
        ends: tuple[Any, ...] = apart(carry, tensors)
        return ends
    before_operator("while_loop")
    after, _ = split("while_loop", "the carry", after_body(carry, trace_outside(body_fn, *carry)), numbers=False)

    def condition(flat: Sequence[Tensor]) -> Any:
        return checked("while_loop", cond_fn(*form.join(flat)))

    flat = repeat_in_graph(condition, lambda flat: tensors_of(body_fn(*form.join(flat))), tensors, after)
    ends = apart(form.join(flat), tensors)
    return ends


def repeat_in_graph(
    condition: Callable[[Sequence[Tensor]], Any], body: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor], after: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Run a loop as one operation of a graph; `after` is the result of `body(tensors)` outside of it."""
    positions = moving(tensors, after)
    first = condition(tensors)
    if not positions or first is False:
        return list(tensors)
    if first is True:
        got = "True, whatever the carry is: the loop would not end"
        raise StructureError(message("while_loop", "a predicate that reads the carry", got, hint="n < 10 of a counter"))
    moved = [tensors[position] for position in positions]
    ref = needs_grad(tensors, after)
    refuse_in_scan("while_loop", ref)
    planes = Planes(ref, moved)

    def whole(flat: Sequence[Tensor]) -> list[Tensor]:
        return replaced(tensors, positions, planes.decode(flat))

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        out = body(whole(flat))
        return tuple([copied(x) for x in planes.encode([out[position] for position in positions])])

    starts = planes.encode(moved)
    start = tuple([anchored(x, ref) for x in starts])
    end = while_operator(lambda *flat: condition(whole(flat)), step, start)
    return whole(end if ref is None else ends_if_ran(first, end, starts))


def checked(op: str, pred: Any) -> Any:
    """Return a predicate: a Python bool, or a 0-d bool tensor that is not batched by vmap; refuse others."""
    hint = "x > 0, x.any() or x.bool()"
    if isinstance(pred, Tensor):
        if pred.dtype != torch.bool:
            raise DtypeError(message(op, "a bool predicate", describe(pred), hint=hint))
        if pred.numel() != 1:
            hint = "pred.any(), pred.all(), or torch.where"
            raise ShapeError(message(op, "a predicate of one element", describe(pred), hint=hint))
        if is_batched(pred):
            hint = "torch.where(pred, a, b)"
            raise UnsupportedError(message(op, "one predicate", "one for each example of a vmap", hint=hint))
        return pred.reshape(())
    if not isinstance(pred, (bool, torch.SymBool)):
        raise DtypeError(message(op, "a bool predicate", describe(pred), hint=hint))
    return pred


def arguments(op: str, what: str, given: Any, *fns: Any) -> tuple[Any, ...]:
    """Return arguments as a tuple; refuse other kinds, and functions that are none."""
    expect_function(op, *fns)
    if not isinstance(given, (tuple, list)):
        raise StructureError(message(op, f"a tuple of {what}", describe(given), hint="(x,) is a tuple of one"))
    return tuple(given)


def after_body(carry: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    """Return the result of a body as a tuple in the form of the carry; refuse others."""
    if not isinstance(out, (tuple, list)) or len(out) != len(carry):
        got = f"{len(out)}" if isinstance(out, (tuple, list)) else describe(out)
        hint = "return a tuple, (x,) for one value"
        raise StructureError(message("while_loop", f"{len(carry)} values from body_fn", got, hint=hint))
    agree("while_loop", ("the carry", carry), ("the result of body_fn", tuple(out)), "keep keys, dtypes and shapes")
    return tuple(out)


def explained_float(error: Any) -> UnsupportedError | None:
    """Say what to write instead of a float that varies, which torch's operators do not take (2.11-2.15)."""
    if "can only be of (<class 'torch.Tensor'>" not in str(error) or "SymFloat" not in str(error):
        return None
    expected, got = "tensors and whole numbers from outside of a branch or a body", "a float that varies"
    hint = "torch.tensor(k), as an argument of the call"
    return UnsupportedError(message("compile.counted", expected, got, hint=hint))


EXPLAINED.append(explained_float)
