"""`torch.autograd.grad` and `torch.autograd.backward` of containers, which torch hands on in eager calls.

    (grads,) = torch.autograd.grad(loss, td)             a TensorDict like td, of gradients
    grads = tdc.autograd_grad(loss, td)                  the same, also in a graph
    torch.autograd.backward(losses, inputs=[td])         adds them to td.grad

A container stands for its floating-point and complex tensors, wherever torch takes a tensor: among the outputs, the
inputs and the gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tdc.compile._torch.autograd import is_recordable, recording
from tdc.compile.gradients import Part, gradient_of, in_form, is_whole, keys_in, traced
from tdc.core.errors import (
    CallError,
    DtypeError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    first_line,
    in_words,
    message,
)
from tdc.core.keys import show
from tdc.core.rules import DISPATCH, IMPLS
from tdc.core.typing import KeyPath
from tdc.ragged.storage import data_of, differentiable
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.tensordict import TensorDict

Leaf = tuple[KeyPath, Any]  # the key, () outside of a TensorDict, and a tensor, a batch or a GradientEdge


def autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    allow_unused: bool | None = None, materialize_grads: bool = False,
) -> Any:  # fmt: skip
    """Gradients of outputs that autograd recorded, in the form of the inputs. See `grad` for those of a function.

    Eagerly `torch.autograd.grad` takes containers, too, and returns a tuple. Torch traces it in no graph; this one it
    does.

    Args:
        outputs: a tensor, a TensorDict or a ragged batch, or a sequence of these.
        inputs: the same, or a dict of these. Their floating-point tensors must require grad.
        grad_outputs: one in the form of each output; not for outputs of one number.
        retain_graph, create_graph, allow_unused, materialize_grads: as in `torch.autograd.grad`. With `allow_unused`
            the gradient of an unused input is None; a TensorDict lacks its key.

    Returns:
        The gradient of `inputs`; a tuple for a sequence, a dict for a dict. A TensorDict lacks keys of integers, a
        ragged batch keeps its structure.

    Raises:
        CallError: tensors that do not require grad, that no output depends on, or outputs of more numbers without
            `grad_outputs`; what torch refuses.
        DtypeError: a container without floating-point tensors.
        StructureError, ShapeError: `grad_outputs` in another form than the outputs.
        UnsupportedError: in a graph before torch 2.13.

    Compile:
        fullgraph (torch 2.13), where the graph has made the inputs: `x.detach().requires_grad_()`. With
        `create_graph` eager only.

    Example:
        >>> td = TensorDict({"w": torch.tensor([1.0, 2.0], requires_grad=True), "step": torch.tensor(1)})
        >>> autograd_grad((td["w"] ** 2).sum(), td).to_dict()
        {'w': tensor([2., 4.])}

    Source:
        `torch.autograd.grad`.
    """
    named = isinstance(inputs, dict)
    given = several(inputs.values() if named else inputs)
    found = grad(
        several(outputs), given, grad_outputs, retain_graph, create_graph,
        allow_unused=allow_unused, materialize_grads=materialize_grads,
    )  # fmt: skip
    if named:
        return dict(zip(inputs, found, strict=True))
    return found[0] if is_one(inputs) else found


def grad(
    outputs: Sequence[Any], inputs: Sequence[Any], grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Run `torch.autograd.grad`, whose arguments it has, on containers."""
    op = "autograd.grad"
    if is_grads_batched:
        hint = "tdc.vmap(lambda g: torch.autograd.grad(y, td, g))(gs), or tdc.jacrev(fn)"
        raise UnsupportedError(message(op, "gradients of tensors alone", "is_grads_batched=True", hint=hint))
    outs, seeds = outputs_of(op, outputs, grad_outputs, "grad_outputs")
    wanted = [leaf for x in inputs for leaf in leaves_of(op, x)]
    require_grad(op, "inputs", wanted)
    found = in_words(
        partial(refused, op), in_graphs, outs, tensors_of(wanted), seeds, retain_graph, create_graph,
        allow_unused=True, materialize_grads=materialize_grads,
    )  # fmt: skip
    unused = [leaf for leaf, g in zip(wanted, found, strict=True) if g is None]
    if unused and not allow_unused:
        hint = "allow_unused=True leaves these out, materialize_grads=True gives zeros"
        raise CallError(message(op, "inputs that the outputs depend on", "others", lines(unused), hint))
    values = iter(found)
    return tuple([gradient_of(x, values) if is_whole(x) else next(values) for x in inputs])


def in_graphs(*args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad` of tensors, which a graph takes by a setting of Dynamo."""
    if traced() and not is_recordable():
        hint = "tdc.grad(fn), or torch 2.13"
        raise UnsupportedError(message("autograd_grad", "a torch that traces it", "an older one", hint=hint))
    with recording() if traced() else nullcontext():
        return torch.autograd.grad(*args, **kwargs)


def backward(
    tensors: Sequence[Any], grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Sequence[Any] | None = None,
) -> None:  # fmt: skip
    """Run `torch.autograd.backward`, whose arguments it has: gradients are added to those of tensors in containers."""
    op = "autograd.backward"
    outs, seeds = outputs_of(op, tensors, grad_tensors, "grad_tensors")
    given = () if inputs is None else several(inputs)
    wanted = [leaf for x in given for leaf in leaves_of(op, x)]
    require_grad(op, "inputs", wanted)
    computed = [leaf for leaf in wanted if not keeps_grad(data_of(leaf[1]))]
    if computed:
        hint = "inputs=[td], a list; of tensors made with requires_grad=True"
        raise CallError(message(op, "inputs that keep a gradient", "results of operations", lines(computed), hint))
    in_words(
        partial(refused, op), torch.autograd.backward, outs, seeds, retain_graph, create_graph,
        inputs=tensors_of(wanted) or None,
    )  # fmt: skip


def keeps_grad(x: Any) -> bool:
    """True if autograd stores the gradient of a tensor in it."""
    return not isinstance(x, Tensor) or x.is_leaf or x.retains_grad


def outputs_of(op: str, outputs: Sequence[Any], grads: Any, name: str) -> tuple[list[Any], list[Any] | None]:
    """Tensors of the outputs, and a gradient for each."""
    leaves = [leaf for x in outputs for leaf in leaves_of(op, x)]
    require_grad(op, "outputs", leaves)
    given = [None] * len(outputs) if grads is None else several(grads)
    if len(given) != len(outputs):
        got = f"{len(given)} for {len(outputs)} outputs"
        raise StructureError(message(op, f"one entry of {name} for each output", got, hint=f"{name}=[...]"))
    seeds = [seed for x, g in zip(outputs, given, strict=True) for seed in seeds_of(op, x, g)]
    many = [leaf for leaf, g in zip(leaves, seeds, strict=True) if g is None and is_wide(leaf[1])]
    if many:
        hint = f"a loss: y.sum() or y.mean(); or {name}=torch.ones_like(y)"
        raise CallError(message(op, "outputs of one number", f"more without {name}", lines(many), hint))
    return tensors_of(leaves), seeds


def is_one(x: Any) -> bool:
    """True for one output or input, not a sequence of them."""
    return is_whole(x) or isinstance(x, (Tensor, GradientEdge))


def several(x: Any) -> list[Any]:
    """One output or input, or a sequence of them, as a list; anything else as one, which is refused later."""
    return list(x) if isinstance(x, Iterable) and not is_one(x) else [x]


def is_wide(x: Any) -> bool:
    """True for an output whose gradient must be given: a batch, or a tensor of more than one number."""
    return is_whole(x) or (isinstance(x, Tensor) and x.numel() != 1)


def seeds_of(op: str, x: Any, grads: Any) -> list[Any]:
    """Gradient of each tensor of an output, in the order of `leaves_of`."""
    if not is_whole(x):
        return [grads]
    if grads is None:
        return [None] * len(leaves_of(op, x))
    return in_form(op, Part(x, op), grads, ("a gradient", "its output"))


def leaves_of(op: str, x: Any) -> list[Leaf]:
    """Tensors and batches to differentiate, in pytree order."""
    if not is_one(x):
        raise DtypeError(message(op, "tensors and containers", describe(x), hint="grad(loss, [x, td])"))
    if isinstance(x, TensorDict):
        leaves: list[Leaf] = [(p, unwrap(x._leaves[p])) for p in keys_in(x) or ()]
    else:
        leaves = [((), x)] if differentiable(x) or not is_whole(x) else []
    if not leaves:
        raise DtypeError(message(op, "floating-point tensors", describe(x), hint="x.float()"))
    return leaves


def lines(leaves: Iterable[Leaf]) -> list[str]:
    """A line for each leaf in a message."""
    return [f"{show(path)}: {describe(x)}" if path else describe(x) for path, x in leaves]


def tensors_of(leaves: Iterable[Leaf]) -> list[Any]:
    """Tensor of each leaf; a GradientEdge as it is."""
    return [data_of(x) for _, x in leaves]


def require_grad(op: str, what: str, leaves: Sequence[Leaf]) -> None:
    """Refuse tensors that do not require grad."""
    wrong = [leaf for leaf in leaves if not isinstance(leaf[1], GradientEdge) and not data_of(leaf[1]).requires_grad]
    if wrong:
        hint = "td.filter(lambda key, leaf: leaf.requires_grad) leaves them out"
        raise CallError(message(op, f"{what} that require grad", "others", lines(wrong), hint))


def refused(op: str, error: Exception) -> TdcError | None:
    """The error for what torch refused; None for one of another kind."""
    ours = {RuntimeError: CallError, TypeError: DtypeError}.get(type(error))
    text = message(op, "a call that torch takes", "another one", hint=f"torch: {first_line(error)}")
    return None if ours is None else ours(text)


for _kind in DISPATCH:
    DISPATCH[_kind] |= {
        torch.autograd.grad: f"{_kind}_autograd_grad",
        torch.autograd.backward: f"{_kind}_autograd_backward",
    }
    IMPLS |= {f"{_kind}_autograd_grad": grad, f"{_kind}_autograd_backward": backward}
