"""Gradients of functions of containers.

    grads = tdc.grad(loss)(params, batch)           a TensorDict like params, of gradients
    value, grads = tdc.value_and_grad(loss)(params, batch)

Arguments may hold integers (a step counter, the running count of a batch norm) and ragged structures, which
`torch.func.grad` refuses. A TensorDict of gradients leaves integers out, a NestedTensor of gradients keeps its
structure. Only floating-point and complex tensors are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.autograd import begin, is_recordable, recording
from tdc.compile._torch.tracing import at_trace_time, mark_backward
from tdc.compile.carries import put_back, tensors_in
from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.arguments import expect_function, int_tuple, positions_of
from tdc.core.dynamo import constant, under_transform
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.keys import parts, unravel_key
from tdc.core.typing import KeyPath
from tdc.layout.structure import require_same
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import BATCHES, data_of, differentiable, with_data
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.paths import ordered
from tdc.tensordict.tensordict import TensorDict, build_td


def grad(fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Gradient of a function that returns one number, with respect to one or several arguments.

    Args:
        fn: returns a 0-d tensor, or with `has_aux` a pair of it and anything.
        argnums: positions of the arguments; several give a tuple.

    Returns:
        A function of the same arguments that returns the gradients, or `(gradients, aux)`.

    Raises:
        DtypeError: an argument without floating-point tensors; a result that is no floating-point tensor.
        ShapeError: a result of more than one number.
        IndexingError: argnums without an argument, or the same twice.
        StructureError: no pair where `has_aux` is True.

    Compile:
        fullgraph, also under `vmap`.

    Example:
        >>> params = TensorDict({"w": torch.tensor(3.0), "step": torch.tensor(1)})
        >>> grad(lambda p: p["w"] ** 2)(params).to_dict()
        {'w': tensor(6.)}

    Source:
        `torch.func.grad`.
    """
    both = both_of("grad", fn, argnums, has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    gradient.derived = fn, argnums, has_aux, False  # type: ignore[attr-defined]  # `vmap` over ragged rows reads it
    return gradient


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Value and gradient of a function; see `grad`.

    Returns:
        A function that returns `(value, gradients)`, or `((value, aux), gradients)`.

    Example:
        >>> value, grads = value_and_grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        >>> value, grads
        (tensor(5.), tensor([2., 4.]))

    Source:
        `torch.func.grad_and_value`; the order of results is that of `jax.value_and_grad`.
    """
    both = both_of("value_and_grad", fn, argnums, has_aux)
    both.derived = fn, argnums, has_aux, True  # type: ignore[attr-defined]  # as that of `grad`
    return both


def both_of(op: str, fn: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool) -> Callable[..., Any]:
    """`value_and_grad`, as part of another operation."""
    expect_function(op, fn)
    int_tuple(op, argnums)

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = positions_of(op, argnums, len(args))
        taken = [Part(args[i], op, sort=False) for i in chosen]

        def inner(values: list[list[Tensor]], rest: list[list[Any]], full: list[Any], named: dict[str, Any]) -> Any:
            full = list(full)
            for i, part, tensors, others in zip(chosen, taken, values, rest, strict=True):
                full[i] = part.filled(tensors, others)
            out = fn(*full, **named)
            check_loss(op, pair_of(op, out)[0] if has_aux else out)
            return out

        others = [None if i in chosen else x for i, x in enumerate(args)]
        run = by_autograd(inner, has_aux) if begin() else by_transform(inner, has_aux)
        grads, value = run([part.tensors for part in taken], [part.others for part in taken], others, kwargs)
        found = [part.gradients(tensors) for part, tensors in zip(taken, grads, strict=True)]
        return value, found[0] if isinstance(argnums, int) else tuple(found)

    return call


def pair_of(op: str, out: Any) -> Any:
    """A result with aux; a StructureError for anything but two values."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise StructureError(message(op, "a pair, as has_aux=True says", describe(out), hint="return result, aux"))
    return out


def check_loss(op: str, loss: Any) -> None:
    """Refuse a result that is not one floating-point number in a tensor."""
    if not isinstance(loss, Tensor) or loss.ndim:
        hint = "return loss.mean() or .sum(); tdc.jacrev and tdc.vjp take results of more numbers"
        error: Any = ShapeError if isinstance(loss, (Tensor, *BATCHES)) else DtypeError
        raise error(message(op, "a function that returns one number, a tensor without dims", describe(loss), hint=hint))
    if not loss.dtype.is_floating_point:
        hint = "a real loss: x.abs(), or .float() before operations on whole numbers"
        raise DtypeError(message(op, "a floating-point loss", describe(loss), hint=hint))


def by_transform(fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Run `torch.func.grad_and_value`, which takes tensors only, with an aux of anything."""
    if not has_aux:
        return torch.func.grad_and_value(fn)
    form: list[Any] = []

    def inner(*args: Any) -> tuple[Any, list[Tensor]]:
        loss, aux = fn(*args)
        return loss, tensors_in(aux, form)

    def run(*args: Any) -> tuple[Any, Any]:
        grads, (loss, tensors) = torch.func.grad_and_value(inner, has_aux=True)(*args)
        return grads, (loss, put_back(tensors, form))

    return run


def by_autograd(fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Run as `torch.func.grad_and_value` by autograd, in a graph in which nothing differentiates the gradients."""

    def run(values: list[list[Tensor]], *rest: Any) -> tuple[list[list[Tensor]], Any]:
        with torch.enable_grad():
            leaves = [[x.detach().requires_grad_() for x in part] for part in values]
            out = fn(leaves, *rest)
            with recording():
                found = iter(recorded(out[0] if has_aux else out, [x for part in leaves for x in part]))
        return [[next(found) for _ in part] for part in leaves], pytree.tree_map(apart, out)

    return run


def recorded(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Gradient of a loss in each tensor as autograd recorded it; zeros where the loss does not depend on one."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in tensors]
    return [*torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)]


def apart(x: Any) -> Any:
    """Detach a tensor; return anything else as it is."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


class Part:
    """One argument, taken apart into the tensors to differentiate and the rest.

    `sort`: tensors in the order of the pytree, whatever order the keys have.
    """

    def __init__(self, arg: Any, op: str, sort: bool = True) -> None:
        self.arg = arg
        leaves = arg._leaves if isinstance(arg, TensorDict) else {}
        dtypes = [x.dtype if isinstance(x, Tensor) else None for x in leaves.values()]
        self.plain = bool(dtypes) and None not in dtypes  # then no call for each leaf: these take time to trace
        if self.plain:
            order, count = differentiable_first(list(leaves), dtypes, sort)
            self.back = inverse(order)
            values = permuted(list(leaves.values()), order)
            self.tensors: list[Tensor] = values[:count]
            self.others: list[Any] = values[count:]
        else:
            self.leaves, self.spec = pytree.tree_flatten(arg, is_leaf=is_batch)
            self.tensors = [data_of(x) for x in self.leaves if differentiable(x)]
            self.others = [x for x in self.leaves if not differentiable(x)]
        if not self.tensors:
            got, hint = describe(arg), "convert it with .float(), or choose other argnums"
            raise DtypeError(message(op, "an argument with floating-point tensors", got, hint=hint))

    def filled(self, tensors: list[Tensor], others: list[Any]) -> Any:
        """Return the argument with other leaves."""
        if self.plain:
            return with_leaves(self.arg, permuted([*tensors, *others], self.back))
        it, rest = iter(tensors), iter(others)
        leaves = [with_data(x, next(it)) if differentiable(x) else next(rest) for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def gradients(self, tensors: list[Tensor]) -> Any:
        """Gradients in the form of the argument, without leaves that have none."""
        if self.plain:
            found = with_leaves(self.arg, permuted([*tensors, *self.others], self.back))
            return found if not self.others else self.arg.apply(lambda x, g: g if differentiable(x) else None, found)
        it = iter(tensors)
        return pytree.tree_map(lambda x: gradient_of(x, it), self.arg, is_leaf=is_whole)


def with_leaves(td: TensorDict, values: list[Any]) -> TensorDict:
    """Replace the leaves of a TensorDict, in its order."""
    return build_td({p: x for p, x in zip(list(td._leaves), values, strict=True)}, td._nodes, td._size, td._device)


@constant
def differentiable_first(paths: Sequence[KeyPath], dtypes: Sequence[Any], sort: bool) -> tuple[tuple[int, ...], int]:
    """Order of leaves with the differentiable ones first, and their number."""
    real = [i for i, d in enumerate(dtypes) if d.is_floating_point or d.is_complex]
    if sort:
        real = sorted(real, key=lambda i: parts(paths[i]))
    return (*real, *[i for i in range(len(paths)) if i not in set(real)]), len(real)


@constant
def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Inverse of a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def permuted(values: list[Any], order: tuple[int, ...]) -> list[Any]:
    """Permute values."""
    return [values[i] for i in order]


def gradient_of(x: Any, tensors: Iterator[Tensor]) -> Any:
    """Gradient of one leaf or TensorDict, from tensors in the order of the pytree; None without one."""
    if not isinstance(x, TensorDict):
        return given(x, next(tensors)) if differentiable(x) else None
    found = by_path(x, tensors)

    def of(key: Any, leaf: Any) -> Any:
        path = unravel_key(key)
        return given(leaf, found[path][1]) if path in found else None

    return x.apply_with_path(of)


def given(x: Any, tensor: Tensor | None) -> Any:
    """Gradient in the form of a leaf; None without one."""
    return None if tensor is None else with_data(x, tensor)


def by_path(td: TensorDict, given: Iterator[Any]) -> dict[KeyPath, tuple[Any, Any]]:
    """Pair the differentiable leaves of a TensorDict, in pytree order, with the next of the given values."""
    return {p: (td._leaves[p], next(given)) for p in keys_in(td) or ()}


def is_batch(x: Any) -> bool:
    """True for a ragged batch of one level or two."""
    return isinstance(x, BATCHES)


def is_whole(x: Any) -> bool:
    """True for a container, whose gradient is one."""
    return isinstance(x, (*BATCHES, TensorDict))


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Value of a function, and its vector-Jacobian product.

    Args:
        fn: returns containers or tensors; with `has_aux` a pair of them and anything.

    Returns:
        `(value, pullback)`, with `has_aux` also aux. `pullback(cotangents)` takes cotangents in the form of the value,
        and returns a tuple with the gradient of each argument, as `grad` gives it.

    Raises:
        DtypeError: an argument or a value without floating-point tensors.
        ShapeError, StructureError: cotangents in another form than the value.

    Compile:
        fullgraph where the pullback is called in the same function.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
        >>> y, pullback = vjp(lambda x: x * x, x)
        >>> pullback(torch.ones_like(y))[0].tolist()
        [[2.0], [4.0, 6.0]]

    Source:
        `torch.func.vjp`.
    """
    expect_function("vjp", fn)
    parts = [Part(x, "vjp") for x in primals]
    run: Any = torch.func.vjp
    form: list[Any] = []
    _, back, found = run(on_tensors(fn, parts, has_aux, "vjp", form), *[p.tensors for p in parts], has_aux=True)
    value, *aux = put_back(found, form)

    def pullback(cotangents: Any) -> tuple[Any, ...]:
        grads = back(in_form("vjp", Part(value, "vjp"), cotangents, ("a cotangent", "the result")))
        return tuple([part.gradients(tensors) for part, tensors in zip(parts, grads, strict=True)])

    return (value, pullback, *aux)


def jvp(
    fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False
) -> tuple[Any, ...]:
    """Value of a function, and its Jacobian-vector product in the form of the value.

    Args:
        fn: returns containers or tensors; with `has_aux` a pair of them and anything.
        tangents: one for each argument, in its form.

    Raises:
        DtypeError: an argument, tangent or value without floating-point tensors.
        ShapeError, StructureError: a tangent in another form than its argument.

    Compile:
        fullgraph.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
        >>> jvp(lambda x: x * x, (x,), (torch.ones_like(x),))[1].tolist()
        [[2.0], [4.0, 6.0]]

    Source:
        `torch.func.jvp`.
    """
    expect_function("jvp", fn)
    wrong = [describe(x) for x in (primals, tangents) if not isinstance(x, (tuple, list))]
    if wrong or len(primals) != len(tangents):
        got = ", ".join(wrong) or f"{len(primals)} and {len(tangents)}"
        raise StructureError(message("jvp", "as many tangents as primals, in tuples", got, hint="jvp(fn, (x,), (t,))"))
    parts = [Part(x, "jvp") for x in primals]
    words = "a tangent", "its argument"
    values = tuple([p.tensors for p in parts])
    directions = tuple([in_form("jvp", p, t, words) for p, t in zip(parts, tangents, strict=True)])
    run: Any = torch.func.jvp
    form: list[Any] = []
    _, out, found = run(on_tensors(fn, parts, has_aux, "jvp", form), values, directions, has_aux=True)
    value, *aux = put_back(found, form)
    return (value, Part(value, "jvp").gradients(out), *aux)


def in_form(op: str, part: Part, given: Any, words: tuple[str, str]) -> list[Tensor]:
    """Tensors of a tangent or cotangent; refuse one that has another form than what it belongs to."""
    tensors = Part(given, op).tensors
    want, got = [[x for x in pytree.tree_leaves(y, is_leaf=is_batch) if differentiable(x)] for y in (part.arg, given)]
    expected = f"{words[0]} in the form of {words[1]}"
    if len(want) != len(got) or keys_in(part.arg) != keys_in(given):
        counted = f"{describe(given)} of {len(got)} tensors for {describe(part.arg)} of {len(want)}"
        raise StructureError(message(op, expected, counted, hint="torch.ones_like(x) has the form of x"))
    for x, y in zip(want, got, strict=True):
        if is_batch(x) == is_batch(y) and data_of(x).ndim == data_of(y).ndim:
            if isinstance(x, NestedTensor) and isinstance(y, NestedTensor):
                require_same(x.structure, y.structure, op)
            if static_sizes(x) == static_sizes(y):
                continue
        wrong = f"{describe(y)} for {describe(x)}"
        raise ShapeError(message(op, expected, wrong, hint="torch.ones_like(x) has the form of x"))
    return tensors


def keys_in(x: Any) -> list[KeyPath] | None:
    """Keys of the differentiable leaves of a TensorDict, in pytree order."""
    leaves = x._leaves if isinstance(x, TensorDict) else None
    return None if leaves is None else [p for p in ordered(leaves) if differentiable(unwrap(leaves[p]))]


def static_sizes(x: Any) -> list[int]:
    """Sizes of the tensor that holds a leaf, without the packed one."""
    sizes, packed = data_of(x).shape, x.structure.packed_dim if isinstance(x, NestedTensor) else -1
    return [n for i, n in enumerate(sizes) if i != packed]


def on_tensors(
    fn: Callable[..., Any], parts: list[Part], has_aux: bool, op: str, form: list[Any]
) -> Callable[..., Any]:
    """Function from lists of tensors to a list of tensors, with the tensors of its value and aux beside."""

    def inner(*values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        out = fn(*[part.filled(tensors, part.others) for part, tensors in zip(parts, values, strict=True)])
        value, aux = pair_of(op, out) if has_aux else (out, None)
        return Part(value, op).tensors, tensors_in((value, aux) if has_aux else (value,), form)

    return inner


def loss_and_gradients(
    loss_fn: Callable[..., tuple[Tensor, Any]], params: TensorDict, *args: Any, in_loop: bool = False
) -> tuple[tuple[Tensor, Any], TensorDict]:
    """Compute `((loss, aux), gradients)` of `loss_fn(params, *args) -> (loss, aux)` for a training step.

    By autograd, so that the loss may use what `torch.func.grad` refuses: control flow, `torch.utils.checkpoint`, hooks,
    `torch.compiler.nested_compile_region`. By `torch.func` under a transform, where something differentiates the step,
    in the loop over micro-batches, and in graphs of torch before 2.13. Both give the same numbers; aux is detached.
    """
    if in_loop or torch.is_grad_enabled() or under_transform() or (traced() and not is_recordable()):
        return value_and_grad(loss_fn, has_aux=True)(params, *args)  # type: ignore[no-any-return]  # open in torch
    at_trace_time(mark_backward)
    part = Part(params, "grad", sort=False)
    own = [x.detach().requires_grad_() for x in part.tensors]
    with torch.enable_grad():
        loss, aux = loss_fn(part.filled(own, part.others), *pytree.tree_map(apart, args))
        with recording() if traced() else nullcontext():
            found = recorded(loss, own)
    return (loss.detach(), pytree.tree_map(apart, aux)), part.gradients(found)
