"""Transforms of several transforms: one after another, for selected leaves, or one for each group of leaves.

A part of a group sees its own leaves only, and its state has their keys. Leaves in no group stay as they are: for
optimisers the parameters, for transforms of gradients the gradients.

Invariant: which leaves belong to which part depends on keys, dtypes and shapes, so a graph looks at it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.optim.checks import check_grads, check_keys, check_td, check_transform, trainable
from tdc.optim.transform import PARAMETERS, Optimizer, Transform, group_of, of_parts, rates_of
from tdc.tensordict.combine import Select, check_select, chosen, refuse_unused
from tdc.tensordict.paths import all_ancestors
from tdc.tensordict.storage import retype
from tdc.tensordict.tensordict import TensorDict, build_td

T = TypeVar("T", bound=Transform)
Groups = Callable[[TensorDict], list[list[bool]]]


@overload
def chain(*parts: *tuple[*tuple[Transform, ...], Optimizer]) -> Optimizer: ...
@overload
def chain(*parts: Transform) -> Transform: ...
def chain(*parts: Transform) -> Transform:
    """Apply transforms one after another.

    Args:
        parts: such as `clip_by_global_norm(1.0)`, `adamw(1e-3)`, `ema(0.999)`: gradients, an optimiser, parameters.

    Returns:
        A `Transform`, with an optimiser among them an `Optimizer`; its state is `{"0": …, "1": …}`, the states of the
        parts in order.

    Raises:
        DtypeError: a part that is not a transform, or does not take what the one before gives.

    Example:
        >>> import torch
        >>> from tdc.optim import clip_by_global_norm, sgd
        >>> opt = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
        >>> params = TensorDict({"w": torch.tensor([3.0, 4.0])})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["1", "step"]
        (tensor([2.4000, 3.2000]), tensor(1))

    Source:
        `optax.chain`.
    """
    op, hint = "optim.chain", "chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.999))"
    if len(parts) == 1 and isinstance(parts[0], (list, tuple)):
        raise DtypeError(message(op, "transforms one by one", f"a {describe(parts[0])} of them", hint="chain(*parts)"))
    if not parts:
        raise DtypeError(message(op, "transforms", "none", hint=hint))
    wrong = {f"part {i}": describe(x) for i, x in enumerate(parts) if not isinstance(x, Transform)}
    refuse_wrong(DtypeError, op, "transforms", wrong, "others", hint)
    for i in range(1, len(parts)):
        if parts[i].takes != parts[i - 1].gives:
            wrong[f"part {i}"] = f"takes {parts[i].takes}, part {i - 1} gives {parts[i - 1].gives}"
    refuse_wrong(DtypeError, op, "parts that take what the one before gives", wrong, "that do not", hint)
    keys = tuple([f"{i}" for i in range(len(parts))])

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        return TensorDict({k: part.init(params) for k, part in zip(keys, parts, strict=True)}, params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_keys(op, state, keys)
        states: dict[str, Any] = {}
        for k, part in zip(keys, parts, strict=True):
            updates, states[k] = part.update(updates, state[k], params)
        return updates, TensorDict(states, params.batch_size)

    def across(process_group: Any) -> Any:
        found = [part.over(process_group) for part in parts]
        return None if None in found else chain(*found)

    return replace(of_parts(dict(zip(keys, parts, strict=True)), init, update), across=across)


def masked(transform: T, select: Select) -> T:
    """Use a transform for some leaves; the others stay as they are.

    Args:
        transform: of gradients, or an optimiser, which then freezes the other leaves.
        select: a glob on the key with dots such as `"*.weight"`, a list of them, or a function `(key, leaf) -> bool`.

    Returns:
        A transform of the same kind; its state is that of the transform for these leaves alone.

    Raises:
        DtypeError: not a transform, or not a selection.
        KeyPathError: in `init` and `update`, a selection without leaves.

    Example:
        >>> import torch
        >>> from tdc.optim import sgd
        >>> params = TensorDict({"fc": {"weight": torch.ones(2), "bias": torch.ones(2)}})
        >>> opt = masked(sgd(0.5), "*.bias")
        >>> opt.update(params, opt.init(params), params)[0]["fc"].to_dict()
        {'weight': tensor([1., 1.]), 'bias': tensor([0.5000, 0.5000])}

    Source:
        `optax.masked`.
    """
    op = "optim.masked"
    check_transform(op, transform)
    check_select(op, select)

    def groups(params: TensorDict) -> list[list[bool]]:
        flags = own_flags(params, select)
        refuse_unused(op, params._leaves, select, flags)
        return [flags]

    return by_paths(op, {"": transform}, groups)


def partition(parts: Mapping[Any, T | None]) -> T:
    """Use another transform, or none, for each group of leaves.

    Args:
        parts: `{select: transform}`; a leaf belongs to the first `select` that matches it. See `masked`; a tuple stands
            for a list. None leaves the group as it is: frozen if the others are optimisers.

    Returns:
        A transform of the kind of the parts; its state is `{"0": …, "1": …}`, in order.

    Raises:
        DtypeError: not a dict, other keys or values, or transforms of different kinds.
        StructureError: in `init` and `update`, leaves in no group; all are named.
        KeyPathError: in `init` and `update`, a pattern that no key matches.

    Example:
        >>> import torch
        >>> from tdc.optim import sgd
        >>> params = TensorDict({"body": {"w": torch.ones(2)}, "head": {"w": torch.ones(2), "b": torch.ones(2)}})
        >>> opt = partition({"*.b": None, "body.*": sgd(0.1), "*": sgd(0.5)})
        >>> new, _ = opt.update(params, opt.init(params), params)
        >>> new["body", "w"], new["head", "w"], new["head", "b"]
        (tensor([0.9000, 0.9000]), tensor([0.5000, 0.5000]), tensor([1., 1.]))

    Source:
        `optax.multi_transform`; the parameter groups of `torch.optim`.
    """
    op = "optim.partition"
    if not isinstance(parts, Mapping) or not parts:
        hint = "partition({'*.bias': adamw(weight_decay=0.0), '*': adamw()})"
        raise DtypeError(message(op, "a dict of transforms", describe(parts), hint=hint))
    for select, part in parts.items():
        check_select(op, select)
        if part is not None:
            check_transform(op, part)
    given = {f"{i}": part for i, part in enumerate(parts.values()) if part is not None}
    kinds = {name: f"takes {part.takes}, gives {part.gives}" for name, part in given.items()}
    if len(set(kinds.values())) != 1:
        got = f"{len(set(kinds.values()))} kinds"
        raise DtypeError(message(op, "transforms of one kind", got, kinds, "all of them optimisers, or None"))

    def groups(params: TensorDict) -> list[list[bool]]:
        flags = [own_flags(params, select) for select in parts]
        for select, found in zip(parts, flags, strict=True):
            if isinstance(select, (str, tuple)) and select != "*":
                refuse_unused(op, params._leaves, select, found)
        owners = first_true(flags)
        lost = [show(p) for (p, x), i in zip(params._leaves.items(), owners, strict=True) if i < 0 and trainable(x)]
        hint = "'*': None as the last group leaves the others as they are"
        refuse_wrong(StructureError, op, "a group for each leaf", lost, "in no group", hint)
        return [[i == n for i in owners] for n, part in enumerate(parts.values()) if part is not None]

    return by_paths(op, given, groups)


def own_flags(params: TensorDict, select: Select) -> list[bool]:
    """Flags of the leaves that are trainable and selected."""
    found = chosen(params._leaves, select)
    return [flag and trainable(x) for flag, x in zip(found, params._leaves.values(), strict=True)]


@constant
def first_true(flags: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """The first group of each leaf; -1 for a leaf in none."""
    return tuple([next((i for i, flag in enumerate(row) if flag), -1) for row in zip(*flags, strict=True)])


def by_paths(op: str, parts: Mapping[str, T], groups: Groups) -> T:
    """A transform of parts for groups, each given as one bool for each leaf of the parameters.

    The state has the names of the parts. The state of a part named "" is the whole state.
    """
    names, transforms = tuple(parts), tuple(parts.values())
    takes, gives = transforms[0].takes, transforms[0].gives
    alone = names == ("",)

    def init(params: TensorDict) -> TensorDict:
        check_td(op, params)
        states = [part.init(subset(params, flags)) for part, flags in zip(transforms, groups(params), strict=True)]
        return states[0] if alone else TensorDict(dict(zip(names, states, strict=True)), params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, updates, state, params)
        if not alone:
            check_keys(op, state, names)
        base = params if takes != gives and gives == PARAMETERS else updates
        leaves, states = {**base._leaves}, {}
        for name, part, flags in zip(names, transforms, groups(params), strict=True):
            known = flags_at(list(params._leaves), flags, list(updates._leaves))
            if known is None:
                check_grads(op, updates, params)
            own = state if alone else state[name]
            new, states[name] = part.update(subset(updates, known or ()), own, subset(params, flags))
            leaves |= new._leaves
        out = build_td(leaves, base._nodes, base._size, base._device)
        return out, states[""] if alone else TensorDict(states, params.batch_size)

    rates = transforms[0].rates if alone else rates_of(parts)
    return replace(
        transforms[0], init=init, update=update, rates=rates, elementwise=False, process_group=group_of(parts)
    )


@constant
def flags_at(paths: Sequence[KeyPath], flags: Sequence[bool], others: Sequence[KeyPath]) -> tuple[bool, ...] | None:
    """Flags of some of the paths; None where one is unknown."""
    table = dict(zip(paths, flags, strict=True))
    return tuple([table[p] for p in others]) if table.keys() >= set(others) else None


def subset(td: TensorDict, flags: Sequence[bool]) -> TensorDict:
    """Leaves of a TensorDict whose flag is True."""
    leaves = {p: x for (p, x), flag in zip(td._leaves.items(), flags, strict=True) if flag}
    above = all_ancestors(list(leaves))
    nodes = {p: entry for p, entry in td._nodes.items() if p == () or p in above}
    return build_td(leaves, retype(leaves, nodes), td._size, td._device)
