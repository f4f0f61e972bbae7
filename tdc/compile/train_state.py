"""The state of a training step, put together again after each step in the order it had.

Invariant: keys, their order and the inner nodes stay, so that the next call finds what was compiled for this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.writes import write_in_graph
from tdc.compile.upstream import traced
from tdc.core.dynamo import constant, has_address, mark_address, storage_id, trace_as
from tdc.core.errors import StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import KeyPath
from tdc.ops.copy import copy_
from tdc.tensordict.paths import arrangement, join, top_keys
from tdc.tensordict.tensordict import TensorDict, build_td


def storages(td: TensorDict) -> set[int] | None:
    """The memory of the tensors of a TensorDict; None in a graph, which does not know it."""
    return None if traced() else {storage_id(x) for x in td._leaves.values() if isinstance(x, Tensor)}


def apart(x: Any, known: set[int] | None) -> Any:
    """A tensor, copied if it may lie in known memory, which is about to be written. In a graph each may; where it is
    computed there, the copy is no kernel of its own. Inductor takes a clone away that is written to an input, also if
    its source is written before (torch 2.13)."""
    if not isinstance(x, Tensor) or not (known is None or storage_id(x) in known):
        return x
    return x.clone() if known is not None else torch.where(x == x, x, x)


def overwrite(olds: list[Any], news: list[Any], known: set[int] | None) -> None:
    """Write new leaves into the memory of old ones, which is the known one."""
    apart_from_it = [apart(x, known) for x in news]  # all of them before one is written
    for old, new in zip(olds, apart_from_it, strict=True):
        copy_(old, new)


def overwrite_in_graph(olds: list[Any], news: list[Any], known: set[int] | None) -> None:
    """What Dynamo traces in place of `overwrite`."""
    pairs = list(zip(olds, news, strict=True))
    for old, new in [pair for pair in pairs if not isinstance(pair[0], Tensor)]:
        copy_(old, new)
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    write_in_graph([old for old, _ in tensors], [new for _, new in tensors])


trace_as(overwrite, overwrite_in_graph)


def unshared(td: TensorDict, other: TensorDict) -> TensorDict:
    """A TensorDict of which each tensor has its own memory, apart from that of another."""
    known = storages(other) or set()

    def own(x: Any) -> Any:
        found = apart(x, known)
        if isinstance(found, Tensor):
            known.add(storage_id(found))
        return found

    return td.apply(own)


def mark_addresses(state: TensorDict) -> None:
    """Mark the tensors of a state that each step writes into, unless they are marked: what CUDA graphs ask for. Of each
    step only one question is asked."""
    step: Any = state._leaves["step"]
    if step.device.type == "cpu" or has_address(step):
        return
    for x in state._leaves.values():
        if isinstance(x, Tensor) and x.device.type != "cpu":
            mark_address(x)


def without_keys(state: TensorDict) -> TensorDict:
    """A state without "rng", which lies on the host: one tensor of the CPU, and a step is no CUDA graph."""
    leaves = {p: x for p, x in state._leaves.items() if p != "rng"}
    return build_td(leaves, state._nodes, state._size, state._device)


def with_keys(new: TensorDict, keys: Tensor, old: TensorDict) -> TensorDict:
    """A new state with "rng" where the old one has it."""
    return in_order({**new._leaves, "rng": keys}, old)


def next_state(new: dict[str, Any], old: TensorDict) -> TensorDict:
    """The new state from its parts, which are most often as in the old one: then its keys are at hand."""
    names = [name for name in top_keys([*old._leaves, *old._nodes]) if name in new]  # no static values, no empty nodes
    tables = [new[name]._leaves if isinstance(new[name], TensorDict) else {(): new[name]} for name in names]
    values: list[Any] = []
    for table in tables:  # whole lists at a time, which takes less time to trace
        values += list(table.values())
    if are_parts(list(old._leaves), names, [list(table) for table in tables]):
        found = {p: x for p, x in zip(list(old._leaves), values, strict=True)}
        return build_td(found, old._nodes, old._size, old._device)
    paths = [join(name, p) for name, table in zip(names, tables, strict=True) for p in table]
    return in_order(dict(zip(paths, values, strict=True)), old)


@constant
def are_parts(paths: Sequence[KeyPath], names: Sequence[str], tables: Sequence[Sequence[KeyPath]]) -> bool:
    """Whether paths are those of parts with these names, one after the other."""
    return [*paths] == [join(name, p) for name, table in zip(names, tables, strict=True) for p in table]


def in_order(leaves: dict[KeyPath, Any], old: TensorDict) -> TensorDict:
    """A state with its keys in the order of the old one; refuses other keys."""
    found = arrangement(list(leaves), list(old._leaves))
    if found == "other":
        wrong = [show(p) for p in {**leaves, **old._leaves} if p not in leaves or p not in old._leaves]
        expected, hint = "a new state of the same keys", "an optimizer's update keeps the keys of what its init made"
        refuse_wrong(StructureError, "compile.train_step", expected, wrong, "that differ", hint)
    if found == "order":
        leaves = {p: leaves[p] for p in old._leaves}
    return build_td(leaves, old._nodes, old._size, old._device)


def check_update(optimizer: Any, params: TensorDict, state: TensorDict) -> None:
    """Refuse an optimiser whose update gives parameters or a state of other keys, shapes or dtypes than it was given.

    It is run once on tensors without numbers; one that reads numbers cannot be, and shows at its first step.
    """
    bare, first = [td.apply(lambda x: x.to("meta") if isinstance(x, Tensor) else x) for td in (params, state)]
    grads = bare.apply(lambda x: x if x.is_floating_point() or x.is_complex() else None)
    try:
        after = optimizer.update(grads, first, bare)
    except (NotImplementedError, RuntimeError):
        return
    if not isinstance(after, tuple) or len(after) != 2 or not all([isinstance(x, TensorDict) for x in after]):
        hint = "update(grads, state, params) -> (params, state)"
        got = ", ".join([describe(x) for x in after]) if isinstance(after, tuple) else describe(after)
        raise StructureError(message("compile.train_step", "an update that returns two TensorDicts", got, hint=hint))
    for name, old, new in (("params", bare, after[0]), ("optimizer", first, after[1])):
        at = {show((name, *parts(p))): formed(new._leaves.get(p), x) for p, x in old._leaves.items()}
        at |= {show((name, *parts(p))): "not there before" for p in new._leaves if p not in old._leaves}
        wrong = {p: text for p, text in at.items() if text}
        expected, hint = (
            "an optimizer whose update keeps the form of params and state",
            "return what init made, updated",
        )
        refuse_wrong(StructureError, "compile.train_step", expected, wrong, "leaves that change", hint)


def formed(new: Any, old: Any) -> str:
    """How a leaf differs from the one before; empty where it does not."""
    if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape and new.dtype == old.dtype:
        return ""
    return f"{describe(new) if new is not None else 'missing'}, before {describe(old)}" if new is not old else ""
