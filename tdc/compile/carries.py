"""Trees of containers as the tuples of tensors that torch's control flow takes, and back.

torch's operators reject every user class as operand, carry or result. So a tree is split into its tensors and a `Form`,
the tensors go through the operator, and the form joins what comes out. What is no tensor (None, a str, a number) is a
constant of the form: it does not go through the operator, and must be the same on both sides.

Invariants:
  - `split(...)[1].join(split(...)[0])` is the tree again;
  - two trees agree when they have one treedef, equal constants, and leaf for leaf one dtype and shape; where they do
    not, the error shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile.vectorize import is_container
from tdc.core import pytree
from tdc.core.errors import DtypeError, StructureError, UnsupportedError, describe, message
from tdc.core.keys import parts
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict

CONSTANTS = (str, type(None))
NUMBERS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class Form:
    """What a tree is apart from its tensors: treedef, constants, and where the tensors stood."""

    __slots__ = ("constants", "positions", "spec")

    def __init__(self, spec: Any, constants: list[Any], positions: list[int]) -> None:
        self.spec = spec
        self.constants = constants
        self.positions = positions

    def join(self, tensors: Sequence[Any]) -> Any:
        """The tree with these tensors."""
        return pytree.tree_unflatten(replaced(self.constants, self.positions, tensors), self.spec)


def replaced(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Values with others at some positions."""
    out = list(values)
    for position, x in zip(positions, others, strict=True):
        out[position] = x
    return out


def split(op: str, what: str, tree: Any, *, numbers: bool = True) -> tuple[list[Tensor], Form]:
    """The tensors of a tree, which messages call `what`, and its form; refuses leaves that are no constants either.

    Without `numbers` Python numbers are no constants: in a loop they would be values that never change.
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
    """The tensors of a tree whose form is known."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def agree(op: str, before: tuple[str, Any], after: tuple[str, Any], hint: str) -> None:
    """Refuse two trees, each given with what it is, that do not have one treedef, equal constants, and tensors of equal
    dtypes and shapes. Both are shown, in full where their keys differ, else the leaves that differ."""
    (name_a, a), (name_b, b) = before, after
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    expected = f"{name_b} in the form of {name_a}"
    if spec_a != spec_b:
        at = [f"{name_a}: {kind(a)} of {', '.join(lines(a))}", f"{name_b}: {kind(b)} of {', '.join(lines(b))}"]
        raise StructureError(message(op, expected, "another treedef", at, hint))
    wrong = [i for i, (x, y) in enumerate(zip(leaves_a, leaves_b, strict=True)) if not same_leaf(x, y)]
    if wrong:
        ours, theirs = lines(a), lines(b)
        at = [f"{ours[i]} in {name_a}, {theirs[i].rpartition(': ')[2]} in {name_b}" for i in wrong]
        raise StructureError(message(op, expected, "leaves that differ", at, hint))


def same_leaf(x: Any, y: Any) -> bool:
    """Whether one leaf may stand for the other: equal dtype, shape and device, or an equal constant."""
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and x.shape == y.shape and x.device == y.device
    return not isinstance(y, Tensor) and type(x) is type(y) and x == y


def kind(tree: Any) -> str:
    """The class of a tree."""
    return getattr(tree, "_label", type(tree).__name__)


def lines(tree: Any) -> list[str]:
    """One line for each leaf: its key path and what it is."""
    return [
        f"{pytree.keystr(path) or 'value'}: {describe(leaf)}" for path, leaf in pytree.tree_flatten_with_path(tree)[0]
    ]


def moving(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[int]:
    """Which tensors of a carry a body changes; the others it hands back as they are, object for object.

    What does not change (offsets of a ragged batch, a table that is looked up) is left out of the carry: it is neither
    copied at each step, nor kept for the backward pass, and it stays the same object as outside. A tensor that stands
    in the carry twice stays out only if it does at all positions, since bodies may exchange them.
    """
    found: list[int] = []
    for i in range(len(before)):  # not `enumerate`, which a graph is traced through three times as long (torch 2.13)
        x = before[i]
        if after[i] is not x or any([before[j] is x and after[j] is not x for j in range(len(before))]):
            found.append(i)
    return found


def rowwise(op: str, what: str, tree: Any, hint: str) -> None:
    """Refuse ragged and padded batches where tensors are sliced or stacked step by step."""
    found = pytree.tree_flatten_with_path(tree, is_leaf=is_container)[0]
    wrong: list[str] = []
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
