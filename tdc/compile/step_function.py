"""One step of training as a pure function of tensors: split, loss, gradients, mean, update. See `train`.

    batch --split--> micro-batches --loss_fn, grad--> gradients, weighted by rows --optimizer--> state, metrics

The mean over micro-batches is weighted by their rows. So where the loss is a mean over rows, gradients and loss are
those of the whole batch, however it divides. Sums are kept in float32 at least.

Invariants:
  - buffers go through the micro-batches in order, as copies: a module may write into those it is given;
  - everything is checked on keys, kinds and shapes, never on values; in a compiled step that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tdc.compile.grad import value_and_grad
from tdc.compile.vmap import is_batch, is_whole
from tdc.core import pytree
from tdc.core.dtypes import widened
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.interop.pytrees import from_pytree, to_pytree
from tdc.tensordict.paths import arrangement, join, top_keys
from tdc.tensordict.tensordict import TensorDict, make

OP = "train_step"


class Updates(Protocol):
    """An optimiser: two functions, such as those of `tdc.optim`."""

    @property
    def init(self) -> Callable[[Any], Any]: ...
    @property
    def update(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]: ...


@dataclass(frozen=True, eq=False)
class Step:
    """`(state, batch) -> (state, metrics)`, pure."""

    loss_fn: Callable[..., Any]
    optimizer: Updates
    buffers: bool
    has_aux: bool
    accumulate: int
    dtype: torch.dtype | None

    def __call__(self, state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
        self.check(state, batch)
        params, buffers = state["params"], state["buffers"] if self.buffers else None
        if self.accumulate == 1:
            grads, metrics, buffers = self.of_batch(params, buffers, batch)
        else:
            grads, metrics, buffers = self.of_parts(params, buffers, batch)
        new: dict[str, Any] = {"step": state["step"] + 1}
        new["params"], new["optimizer"] = self.optimizer.update(grads, state["optimizer"], params)
        if buffers is not None:
            new["buffers"] = buffers
        if "rng" in state._leaves:
            new["rng"] = advanced(state["rng"])
        return assembled(new, state), metrics

    def of_batch(self, params: TensorDict, buffers: Any, batch: Any) -> tuple[Any, TensorDict, Any]:
        """Gradients, metrics and new buffers of one batch, or of one part of it."""

        def loss_of(params: TensorDict, buffers: Any, batch: Any) -> tuple[Tensor, tuple[Any, Any]]:
            with nullcontext() if self.dtype is None else torch.autocast(place_of(params).type, self.dtype):
                out = self.loss_fn(params, batch) if buffers is None else self.loss_fn(params, buffers, batch)
            return self.taken_apart(out, buffers)

        own = None if buffers is None else buffers.apply(torch.clone)
        (loss, (new, aux)), grads = value_and_grad(loss_of, has_aux=True)(params, own, batch)
        return grads, TensorDict({"loss": loss, **dict(aux.items())}), None if buffers is None else new

    def of_parts(self, params: TensorDict, buffers: Any, batch: Any) -> tuple[Any, TensorDict, Any]:
        """The same of a whole batch, from its parts one after another."""
        sums: list[Any] = []
        total = 0
        for part, rows in split(batch, self.accumulate):
            grads, metrics, buffers = self.of_batch(params, buffers, part)
            found = [grads.apply(lambda g, n=rows: widened(g) * n), metrics.apply(lambda x, n=rows: weighted(x, n))]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            total = total + rows
        means = sums[0].apply_with_path(lambda p, g: (g / total).to(params[p].dtype))
        return means, sums[1].apply(lambda x: x / total if x.is_floating_point() else x), buffers

    def taken_apart(self, out: Any, buffers: Any) -> tuple[Tensor, tuple[Any, Any]]:
        """What loss_fn returned, as `(loss, (buffers, aux))`.

        Raises:
            DtypeError: it is something else.
            ShapeError: the loss is more than one number.
            StructureError: buffers of other keys, or a metric called loss.
        """
        names = ["loss", *["buffers"] * (buffers is not None), *["aux"] * self.has_aux]
        parts: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
        if len(parts) != len(names):
            got = f"{len(parts)} results" if isinstance(out, tuple) else describe(out)
            hint = "has_aux=True for metrics beside the loss" if len(parts) > len(names) else "return all of them"
            raise DtypeError(message(OP, f"a loss_fn that returns {', '.join(names)}", got, hint=hint))
        loss, aux = parts[0], parts[-1] if self.has_aux else {}
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise DtypeError(message(OP, "a floating-point tensor as loss", describe(loss), hint="F.mse_loss(x, y)"))
        if loss.ndim:
            raise ShapeError(message(OP, "a loss of one number", describe(loss), hint="loss.mean()"))
        if not isinstance(aux, (Mapping, TensorDict)):
            raise DtypeError(message(OP, "a dict of metrics as aux", describe(aux), hint="return loss, {'name': aux}"))
        if "loss" in aux:
            raise StructureError(message(OP, "metrics beside the loss", "one called 'loss'", hint="rename it"))
        given = {} if buffers is None else parts[1]
        if buffers is not None and (
            not isinstance(given, TensorDict) or given._leaves.keys() != buffers._leaves.keys()
        ):
            got, hint = describe(given), "return the buffers that the module left behind"
            raise StructureError(message(OP, "buffers of the keys that went in", got, hint=hint))
        return loss, (given, TensorDict(aux))

    def check(self, state: Any, batch: Any) -> None:
        """A state of this step, and a batch.

        Raises:
            StructureError, DtypeError: one of them is not.
        """
        names = ["params", "optimizer", *["buffers"] * self.buffers]
        if not isinstance(state, TensorDict):
            raise DtypeError(message(OP, "a state made by init", describe(state), hint="state = step.init(net)"))
        lacking = [p for p in names if p not in state._nodes] + [p for p in ["step"] if p not in state._leaves]
        if lacking:
            got, hint = f"one without {', '.join(lacking)}", "state = step.init(net)"
            raise StructureError(message(OP, "a state made by init", got, hint=hint))
        if batch is None:
            raise DtypeError(message(OP, "a batch", "None", hint="step(state, batch)"))


def place_of(td: TensorDict) -> torch.device:
    """The device of the first tensor."""
    return next(x.device for x in td._leaves.values())


def assembled(new: dict[str, Any], old: TensorDict) -> TensorDict:
    """The new state from its parts, which are most often as in the old one: then its keys are at hand.

    Raises:
        StructureError: it has other keys.
    """
    names = [name for name in top_keys([*old._leaves, *old._nodes]) if name in new]  # no static values, no empty nodes
    tables = [new[name]._leaves if isinstance(new[name], TensorDict) else {(): new[name]} for name in names]
    values = [x for table in tables for x in list(table.values())]
    if lined_up(list(old._leaves), names, [list(table) for table in tables]):
        found = {p: x for p, x in zip(list(old._leaves), values, strict=True)}
        return make(found, old._nodes, old._size, old._device)
    paths = [join(name, p) for name, table in zip(names, tables, strict=True) for p in table]
    return in_order(dict(zip(paths, values, strict=True)), old)


@constant
def lined_up(paths: Sequence[KeyPath], names: Sequence[str], tables: Sequence[Sequence[KeyPath]]) -> bool:
    """Whether paths are those of parts with these names, one after the other."""
    return [*paths] == [join(name, p) for name, table in zip(names, tables, strict=True) for p in table]


def in_order(leaves: dict[KeyPath, Any], old: TensorDict) -> TensorDict:
    """A state with its keys in the order of the old one, so that the next call finds what was compiled for this.

    Raises:
        StructureError: it has other keys.
    """
    found = arrangement(list(leaves), list(old._leaves))
    if found == "other":
        wrong = [show(p) for p in {**leaves, **old._leaves} if p not in leaves or p not in old._leaves]
        hint = "an optimizer's update keeps the keys of what its init made"
        raise StructureError(message(OP, "a new state of the same keys", f"{len(wrong)} that differ", wrong, hint))
    if found == "order":
        leaves = {p: leaves[p] for p in old._leaves}
    return make(leaves, old._nodes, old._size, old._device)


# -- micro-batches


def split(batch: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Parts of a batch along its first dim, and how many rows each has.

    Raises:
        ShapeError: no first dim, or fewer rows than parts.
    """
    rows = first_size(batch)
    if rows < count:
        hint = "accumulate=1, or larger batches"
        raise ShapeError(message(OP, f"a batch of at least {count} rows", f"{rows}", hint=hint))
    td: Any = batch
    spec = None
    if isinstance(batch, TensorDict):  # with the size that its leaves have, which a compiled graph knows to vary
        td = make(batch._leaves, batch._nodes, torch.Size([rows, *batch._size[1:]]), batch._device)
    else:
        td, spec = from_pytree(batch, [rows])
    ends = [i * rows // count for i in range(count + 1)]  # arithmetic alone, so that all sizes are one graph
    lengths = [ends[i + 1] - ends[i] for i in range(count)]
    parts: tuple[Any, ...] = torch.split(td, lengths)
    for part, length in zip(parts, lengths, strict=True):
        yield (part if spec is None else to_pytree(part, spec)), length


def first_size(batch: Any) -> Any:
    """How many rows a batch has, as its first leaf says.

    Raises:
        ShapeError: it has no first dim.
    """
    leaves = (
        list(batch._leaves.values()) if isinstance(batch, TensorDict) else pytree.tree_leaves(batch, is_leaf=is_whole)
    )
    sizes = [x.shape for x in leaves if isinstance(x, (Tensor, TensorDict)) or is_batch(x)]
    if not sizes or not len(sizes[0]) or (isinstance(batch, TensorDict) and not batch.ndim):
        got, hint = describe(batch), "give the batch its batch_size, or accumulate=1"
        raise ShapeError(message(OP, "a batch with a first dim to split", got, hint=hint))
    return sizes[0][0]


def weighted(x: Tensor, rows: Any) -> Tensor:
    """A metric as a term of a mean over rows; counts are summed as they are."""
    return widened(x) * rows if x.is_floating_point() else x


# -- random numbers: splitmix64, whose state is a number that grows by a constant

GAMMA, BITS = 0x1E3779B97F4A7C15, 0x3FFFFFFFFFFFFFFF  # kept to 62 bits, so that int64 never overflows


def advanced(keys: Tensor) -> Tensor:
    """The next state, one for each member."""
    return (keys + GAMMA) & BITS


def mixed(key: int) -> int:
    """The number that a state stands for."""
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (key ^ (key >> 31)) & BITS
