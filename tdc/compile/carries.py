"""Trees of containers as flat tensors, which is all that torch's control flow and transforms take, and back.

Control flow: a tree is split into its tensors and a `Form`; the tensors go through the operator, and the form joins
them. None, strings and numbers are constants of the form, equal on both sides.

    tensors, form = split(op, "the carry", tree)          form.join(tensors)

Transforms: constants stay beside the function.

    form: list[Any] = []
    tensors = transform(lambda *args: tensors_in(fn(*args), form))(*args)
    out = put_back(tensors, form)

Invariant: two trees agree when they have one treedef, equal constants, and leaf for leaf one dtype and shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.dynamo import storage_id
from tdc.core.errors import DtypeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import parts
from tdc.core.typing import MISSING
from tdc.ragged.storage import BATCHES, data_of, is_ragged, with_data
from tdc.tensordict.shared import Shared
from tdc.tensordict.tensordict import TensorDict

CONSTANTS = (str, type(None))
NUMBERS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class Form:
    """A tree without its tensors: treedef, constants, and positions of the tensors."""

    __slots__ = ("constants", "positions", "spec")

    def __init__(self, spec: Any, constants: list[Any], positions: list[int]) -> None:
        self.spec = spec
        self.constants = constants
        self.positions = positions

    def join(self, tensors: Sequence[Any]) -> Any:
        """Return the tree with these tensors."""
        return pytree.tree_unflatten(replaced(self.constants, self.positions, tensors), self.spec)


def replaced(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Copy values, with others at some positions."""
    out = list(values)
    for position, x in zip(positions, others, strict=True):
        out[position] = x
    return out


def split(op: str, what: str, tree: Any, *, numbers: bool = True) -> tuple[list[Tensor], Form]:
    """Split a tree, which messages call `what`, into its tensors and its form; refuse leaves of other types.

    Without `numbers` Python numbers are refused, too: in a loop they would be values that never change.
    """
    leaves, spec = pytree.tree_flatten(tree)
    takes = CONSTANTS + NUMBERS if numbers else CONSTANTS
    if not all([isinstance(x, (Tensor, *takes)) for x in leaves]):
        wrong = [line for line, x in zip(lines(tree), leaves, strict=True) if not isinstance(x, (Tensor, *takes))]
        hint = "numbers as tensors: torch.tensor(0); other objects from outside, by closure"
        raise DtypeError(message(op, f"tensors and containers in {what}", "leaves of other types", wrong, hint))
    positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    return [leaves[i] for i in positions], Form(spec, [None if isinstance(x, Tensor) else x for x in leaves], positions)


def tensors_of(tree: Any) -> list[Tensor]:
    """Tensors of a tree whose form is known."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def agree(op: str, before: tuple[str, Any], after: tuple[str, Any], hint: str) -> None:
    """Refuse two named trees that do not agree; show both if their keys differ, else the leaves that differ."""
    (name_a, a), (name_b, b) = before, after
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    expected = f"{name_b} in the form of {name_a}"
    if spec_a != spec_b:
        at = [
            f"{name}: {getattr(tree, '_label', type(tree).__name__)} of {', '.join(lines(tree))}"
            for name, tree in (before, after)
        ]
        raise StructureError(message(op, expected, "another treedef", at, hint))
    wrong = [i for i, (x, y) in enumerate(zip(leaves_a, leaves_b, strict=True)) if not same_leaf(x, y)]
    if wrong:
        ours, theirs = lines(a), lines(b)
        at = [f"{ours[i]} in {name_a}, {theirs[i].rpartition(': ')[2]} in {name_b}" for i in wrong]
        raise StructureError(message(op, expected, "leaves that differ", at, hint))


def same_leaf(x: Any, y: Any) -> bool:
    """True for tensors of equal dtype, shape and device, and for equal constants."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and x.shape == y.shape and x.device == y.device
    return not isinstance(y, Tensor) and type(x) is type(y) and x == y


def lines(tree: Any) -> list[str]:
    """One line for each leaf: its key path and its description."""
    found = pytree.tree_flatten_with_path(tree)[0]
    return [f"{pytree.keystr(path) or 'value'}: {describe(leaf)}" for path, leaf in found]


def moving(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[int]:
    """Positions of tensors in a carry that a body changes; the others it returns as the same objects.

    Unchanged tensors, such as offsets, are left out of the carry: neither copied at each step nor kept for backward. A
    tensor that stands in the carry twice is left out only if it is unchanged at all positions.
    """
    found: list[int] = []
    for i in range(len(before)):  # not `enumerate`, which a graph is traced through three times as long (torch 2.13)
        x = before[i]
        if after[i] is not x or any([before[j] is x and after[j] is not x for j in range(len(before))]):
            found.append(i)
    return found


def apart(out: Any, given: Sequence[Tensor]) -> Any:
    """Results with a copy of each tensor that is one of `given` or, in eager calls, shares memory with one; a batch
    keeps its offsets or lengths. In a graph operators copy, but what they leave out of their operands."""

    def own(x: Any) -> Any:
        if not isinstance(x, (Tensor, *BATCHES)):
            return x
        batch: Any = x
        data = data_of(batch)
        return with_data(batch, data.clone()) if any([shares(data, other) for other in given]) else x

    return pytree.tree_map(own, out, is_leaf=lambda x: isinstance(x, BATCHES))


def shares(x: Tensor, y: Tensor) -> bool:
    """True for one tensor, and eagerly for two that share memory."""
    if x is y:
        return True
    if traced() or x.layout != torch.strided or y.layout != torch.strided:
        return False
    return storage_id(x) == storage_id(y)


def rowwise(op: str, what: str, tree: Any, hint: str) -> None:
    """Refuse ragged and padded batches where tensors are sliced or stacked step by step."""
    found = pytree.tree_flatten_with_path(tree, is_leaf=is_container)[0]
    wrong: list[str] = []
    tds = [x for _, x in found if isinstance(x, TensorDict)]
    shared = [describe(leaf) for x in tds for leaf in x._leaves.values() if type(leaf) is Shared]
    cure = "td.exclude(key), and the tensor itself from outside of the function"
    refuse_wrong(UnsupportedError, op, f"rows in {what}", shared, "that all steps share", cure)
    for path, x in found:
        inner = x._leaves.items() if isinstance(x, TensorDict) else [((), x)]
        wrong += [
            f"{pytree.keystr(path) + ''.join([f'[{k!r}]' for k in parts(key)]) or 'value'}: {describe(leaf)}"
            for key, leaf in inner
            if is_ragged(leaf)
        ]
    if wrong:
        got = "ragged or padded batches"
        raise UnsupportedError(message(op, f"tensors and TensorDicts of tensors in {what}", got, wrong, hint))


def is_container(x: Any) -> bool:
    """True for a TensorDict and for ragged and padded batches."""
    return is_ragged(x) or isinstance(x, TensorDict)


def tensors_in(out: Any, form: list[Any]) -> list[Tensor]:
    """Tensors of a result, in the order of its pytree; `form` becomes all the rest."""
    leaves, spec = pytree.tree_flatten(out)
    form[:] = [MISSING if isinstance(x, Tensor) else x for x in leaves], spec
    return [x for x in leaves if isinstance(x, Tensor)]


def put_back(tensors: Sequence[Tensor], form: list[Any]) -> Any:
    """Result of these tensors and what `tensors_in` kept."""
    others, spec = form
    found = iter(tensors)
    return pytree.tree_unflatten([next(found) if x is MISSING else x for x in others], spec)
