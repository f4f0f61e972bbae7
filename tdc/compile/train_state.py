"""The entries of a training state: how they begin, go on, and are written into the memory of the old state.

    "rng"       splitmix64, a number that grows by a constant; random numbers of a step begin there
    "scaler"    the scale of float16 losses, as of `torch.amp.GradScaler`: halved where a gradient overflows, which
                leaves the step out, doubled after 2000 steps that went well

Invariant: keys, their order and the inner nodes stay, so that the next call finds what was compiled for this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.compile._torch.writes import write_in_graph
from tdc.compile.upstream import traced
from tdc.core.dtensor import is_dtensor, local_of, with_local
from tdc.core.dynamo import constant, has_address, mark_address, storage_id, traced_for
from tdc.core.errors import StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import KeyPath
from tdc.ops.tensordict.copy import copy_
from tdc.tensordict.paths import arrangement, join, top_keys
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step"
GAMMA, BITS = 0x1E3779B97F4A7C15, 0x3FFFFFFFFFFFFFFF  # kept to 62 bits, so that int64 never overflows

# -- new states


def next_state(new: dict[str, Any], old: TensorDict) -> TensorDict:
    """Put the new entries together in the order of the old state."""
    names = [name for name in top_keys([*old._leaves, *old._nodes]) if name in new]  # no static values, no empty nodes
    tables = [new[name]._leaves if isinstance(new[name], TensorDict) else {(): new[name]} for name in names]
    values: list[Any] = []
    for table in tables:  # whole lists at a time, which takes less time to trace
        values += list(table.values())
    paths = joined_paths(names, [list(table) for table in tables])
    return in_order({p: x for p, x in zip(paths, values, strict=True)}, old)


@constant
def joined_paths(names: Sequence[str], tables: Sequence[Sequence[KeyPath]]) -> tuple[KeyPath, ...]:
    """Key paths of a state, from those of its entries."""
    return tuple([join(name, p) for name, table in zip(names, tables, strict=True) for p in table])


def in_order(leaves: dict[KeyPath, Any], old: TensorDict) -> TensorDict:
    """Return a state with its keys in the order of the old one; refuse other keys."""
    found = arrangement(list(leaves), list(old._leaves))
    if found == "other":
        wrong = [show(p) for p in {**leaves, **old._leaves} if p not in leaves or p not in old._leaves]
        expected, hint = "a new state of the same keys", "an optimizer's update keeps the keys of what its init made"
        refuse_wrong(StructureError, OP, expected, wrong, "that differ", hint)
    if found == "order":
        leaves = {p: leaves[p] for p in old._leaves}
    return build_td(leaves, old._nodes, old._size, old._device)


def without_keys(state: TensorDict) -> TensorDict:
    """Leave out "rng", a tensor of the host: one tensor of the CPU, and a step is no CUDA graph."""
    leaves = {p: x for p, x in state._leaves.items() if p != "rng"}
    return build_td(leaves, state._nodes, state._size, state._device)


def check_update(optimizer: Any, params: TensorDict, state: TensorDict) -> None:
    """Refuse an optimiser whose update changes keys, shapes or dtypes of parameters or of its state.

    It is run once on the meta device; one that reads numbers cannot be, and shows at its first step.
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
        raise StructureError(message(OP, "an update that returns two TensorDicts", got, hint=hint))
    expected = "an optimizer whose update keeps the form of params and state"
    for name, old, new in (("params", bare, after[0]), ("optimizer", first, after[1])):
        wrong = {show((name, *parts(p))): difference(new._leaves.get(p), x) for p, x in old._leaves.items()}
        wrong |= {show((name, *parts(p))): "not there before" for p in new._leaves if p not in old._leaves}
        wrong = {p: text for p, text in wrong.items() if text}
        refuse_wrong(StructureError, OP, expected, wrong, "leaves that change", "return what init made, updated")


def difference(new: Any, old: Any) -> str:
    """Describe how a leaf differs from the one before; empty where it does not."""
    if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape and new.dtype == old.dtype:
        return ""
    return f"{describe(new) if new is not None else 'missing'}, before {describe(old)}" if new is not old else ""


# -- memory


def storages(td: TensorDict) -> set[int] | None:
    """Memory of the tensors of a TensorDict; None in a graph, which does not know it."""
    return None if traced() else {storage_id(x) for x in td._leaves.values() if isinstance(x, Tensor)}


def apart(x: Any, known: set[int] | None) -> Any:
    """Copy a tensor if it may share known memory, which is about to be written. In a graph every tensor may.

    Inductor drops a clone that is written to an input, also if its source is written before (torch 2.13).
    """
    if not isinstance(x, Tensor) or not (known is None or storage_id(x) in known):
        return x
    return x.clone() if known is not None else torch.where(x == x, x, x)


def overwrite(olds: list[Any], news: list[Any], known: set[int] | None) -> None:
    """Write new leaves into the memory of old ones, which is the known one."""
    copies = [apart(x, known) for x in news]  # all of them before one is written
    for old, new in zip(olds, copies, strict=True):
        copy_(old, new)


@traced_for(overwrite)
def overwrite_in_graph(olds: list[Any], news: list[Any], known: set[int] | None) -> None:
    """Write as `overwrite`, in a graph."""
    pairs = list(zip(olds, news, strict=True))
    for old, new in [pair for pair in pairs if not isinstance(pair[0], Tensor)]:
        copy_(old, new)
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    write_in_graph([old for old, _ in tensors], [new for _, new in tensors])


def unshared(td: TensorDict, other: TensorDict) -> TensorDict:
    """Give each tensor its own memory, apart from that of another TensorDict."""
    known = storages(other) or set()

    def own(x: Any) -> Any:
        found = apart(x, known)
        if isinstance(found, Tensor):
            known.add(storage_id(found))
        return found

    return td.apply(own)


def locals_of(td: TensorDict) -> TensorDict:
    """A TensorDict with the part of this process in place of each DTensor; itself without one."""
    if not any([is_dtensor(x) for x in td._leaves.values()]):
        return td
    return build_td({p: local_of(x) for p, x in td._leaves.items()}, td._nodes, td._size, td._device)


def with_locals(new: TensorDict, old: TensorDict) -> TensorDict:
    """The inverse of `locals_of`: DTensors where the old state has them."""
    leaves = {p: with_local(x, old._leaves[p]) if is_dtensor(old._leaves.get(p)) else x for p, x in new._leaves.items()}
    return build_td(leaves, new._nodes, new._size, new._device)


def mark_addresses(state: TensorDict) -> None:
    """Mark the tensors of a state on an accelerator as written in place by each step, for CUDA graphs."""
    step: Any = state._leaves["step"]
    if step.device.type == "cpu" or has_address(step):
        return
    for x in state._leaves.values():
        if isinstance(x, Tensor) and x.device.type != "cpu":
            mark_address(x)


# -- random numbers


def advanced(keys: Tensor) -> Tensor:
    """Advance the random state, one number for each model of an ensemble."""
    return (keys + GAMMA) & BITS


def mixed(key: int) -> int:
    """Mix a random state to the number that it stands for; a seed is mixed to its first state."""
    key &= BITS
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (key ^ (key >> 31)) & BITS


@contextmanager
def seeded(keys: Tensor, device: torch.device, rank: int = 0) -> Iterator[None]:
    """Draw random numbers of these keys and of a rank, on the CPU and on the device; restore the generators after."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append(module.default_generators[module.current_device() if device.index is None else device.index])
    before = [g.get_state() for g in generators]
    seed = rank
    for key in keys.flatten().tolist():
        seed = mixed(seed ^ key)
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)


# -- scales of float16 losses, and steps that are left out


class Scaling(NamedTuple):
    """The first scale, the factors after `interval` finite steps and after one that is not."""

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


SCALING = Scaling()


def first_scale(size: Any, device: torch.device | str | None, how: Scaling) -> TensorDict:
    """Scale before the first step, and the number of finite steps since it last changed."""
    scale = torch.full(size, float(how.start), device=device)
    return TensorDict({"scale": scale, "growth_tracker": torch.zeros(size, dtype=torch.int64, device=device)}, size)


def next_scale(scaler: TensorDict, finite: Tensor, how: Scaling) -> TensorDict:
    """Scale after a step whose gradients were finite, or not."""
    scale, tracker = scaler["scale"], scaler["growth_tracker"] + 1
    grown = scale * how.growth
    due = tracker == how.interval
    larger = torch.where(due & grown.isfinite(), grown, scale)
    after = {
        "scale": torch.where(finite, larger, scale * how.backoff),
        "growth_tracker": torch.where(finite & ~due, tracker, 0),
    }
    return scaler.update(after)


def unscaled(grads: TensorDict, scale: Tensor) -> TensorDict:
    """Gradients of the loss itself."""
    inverse = scale.reciprocal()
    return grads.apply(lambda g: (g * inverse).to(g.dtype))


def chosen(finite: Tensor, after: Any, before: Any) -> Any:
    """Take the result of a finite step; keep what was before of one that is left out."""
    if isinstance(after, TensorDict):
        return after.apply(lambda a, b: a if a is b else torch.where(finite, a, b), before)
    return torch.where(finite, after, before)
