"""A block for the examples that are there: under vmap, so that it means what it means for one example."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.ragged_example import DETACHED, RaggedExample
from tdc.autobatch.source import OP
from tdc.autobatch.values import NUMBER_ASKED, NUMBERS, Lane, flatten, is_lane, is_tree, lane_of, unflatten
from tdc.compile._torch.lanes import map_lanes
from tdc.compile._torch.levels import current_level
from tdc.compile.upstream import traced
from tdc.core.dynamo import is_batched
from tdc.core.errors import UnsupportedError, message
from tdc.ragged.nested import NestedTensor


def run(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """The tuple that `fn(*args)` returns for each of `count` examples. What is the same for all stays one value."""
    leaves, spec = flatten(list(args)) if any([is_tree(x) for x in args]) else (args, None)
    return run_leaves(fn if spec is None else (lambda *own: fn(*unflatten(list(own), spec))), leaves, count)


def run_leaves(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """`run` where no argument is a tree. Of a ragged batch a block sees one example, and what it returns of them is
    ragged as well."""
    tensors: list[Tensor] = []
    numbers = False
    for x in args:  # loops, not comprehensions: a graph is traced through them faster
        if type(x) is Lane and isinstance(x.data, Tensor):  # not `is_lane`, which is a call more
            tensors.append(x.data)
            numbers = numbers or x.number
    if numbers:
        tensors = data_of([x for x in args if is_lane(x)], args)
    trees: list[Any] = []

    def inner(*given: Tensor) -> Sequence[Any]:
        out = fn(*(given if len(given) == len(args) else mixed(args, given)))
        for x in out:
            if is_tree(x):
                leaves, spec = flatten(out)
                trees.append(spec)
                for leaf in leaves if traced() else ():
                    refuse_fields(leaf)
                return leaves
        return out

    found, mapped = map_lanes(inner, tensors, count) if traced() else map_eagerly(inner, tensors, count)
    leaves: list[Any] = []
    for x, m in zip(found, mapped, strict=True):
        leaves.append(lane_of(x) if m else lane_of(x.batch) if isinstance(x, RaggedExample) else x)
    return unflatten(leaves, trees[0]) if trees else leaves


def mixed(args: Sequence[Any], given: Sequence[Tensor]) -> list[Any]:
    """Arguments with one example of what differs between examples."""
    parts = iter(given)
    return [x if type(x) is not Lane else next(parts) if is_lane(x) else example(x) for x in args]


def map_eagerly(fn: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], count: int) -> Any:
    """`map_lanes`, which says what to write instead of what vmap has not.

    Raises:
        UnsupportedError: as `SAID` has it; an object among the results that has tensors of one example inside.
    """
    try:
        found, mapped = map_lanes(fn, tensors, count)
    except RuntimeError as error:
        for text, expected, got, hint in SAID:
            if text in str(error):
                raise UnsupportedError(message(OP, expected, got, hint=hint)) from error
        raise
    for x, is_mapped in zip(found, mapped, strict=True):
        if not is_mapped and not isinstance(x, (Tensor, RaggedExample, *PLAIN)) and holds_example(x):
            raise of_object(type(x).__name__)
    return found, mapped


def refuse_fields(x: Any) -> None:
    """Refuse a dataclass that has tensors of one example inside: a graph is traced through no search for these.

    Raises:
        UnsupportedError: it has.
    """
    if is_tree(x) and is_dataclass(x):
        for name in x.__dataclass_fields__:
            value = getattr(x, name)
            if isinstance(value, RaggedExample) or (isinstance(value, Tensor) and is_batched(value)):
                raise of_object(type(x).__name__)


def of_object(name: str) -> UnsupportedError:
    """The error for an object of some class that leaves its block with tensors of one example."""
    got = f"a {name} that has such a tensor inside, and is needed behind a test or in a loop"
    hint = "make it again where it is used, or keep its tensors in a tuple, dict or TensorDict"
    return UnsupportedError(message(OP, "tensors of an example in trees", got, hint=hint))


PLAIN = (*NUMBERS, str, bytes, type(None), type, ModuleType, torch.nn.Module, torch.dtype, torch.device)


def holds_example(x: Any, depth: int = 5) -> bool:
    """Whether an object, such as a function or an iterator, has a tensor of one example inside: behind the block it
    would stand for other examples."""
    if isinstance(x, Tensor):
        return is_batched(x)
    if isinstance(x, RaggedExample) or depth == 0 or isinstance(x, PLAIN):
        return isinstance(x, RaggedExample)
    parts = gc.get_referents(x)
    if isinstance(x, FunctionType):  # not its globals
        parts = [*[cell.cell_contents for cell in x.__closure__ or ()], *(x.__defaults__ or ())]
    return any([holds_example(part, depth - 1) for part in parts])


NO_NUMBER = (
    *NUMBER_ASKED,
    "torch.ones_like(x[:, 0]).cumsum(0) - 1 for torch.arange(x.size(0)), x.new_zeros(...) for torch.zeros",
)  # fmt: skip
SAID = (  # what is in torch's message, and what ours says
    ("calling .item()", *NO_NUMBER),
    ("doesn't have storage", *NO_NUMBER),
    (
        "data-dependent control flow", "tests that tdc.batch sees", "one in a function that is called",
        "decorate that function with tdc.batch, and call it as f(x) or self.f(x), under no other local name",
    ),
    (
        "differently shaped", "results of one shape", "x[mask] or the like, of another size for each example",
        "torch.where(mask, x, 0)",
    ),
    (
        "can support dynamic shape", "results of one shape", "x[mask] or the like, of another size for each example",
        "torch.where(mask, x, 0)",
    ),
    ("accessing `data`", "operations that vmap has", "x.data", DETACHED),
    (
        "Batching rule not implemented", "operations that vmap has", "one that it has not, named above",
        "call it on the whole batch, outside",
    ),
)  # fmt: skip


def example(x: Lane) -> RaggedExample:
    """One example of a ragged batch."""
    return RaggedExample(x.data, current_level())


def data_of(lanes: Sequence[Lane], args: Sequence[Any]) -> list[Tensor]:
    """The tensors of lanes. Floats that differ between examples are as wide as the widest tensor, so that none is
    widened."""
    tensors = [x.data if type(x) is Lane else x for x in args if not (type(x) is Lane and x.number)]
    wide = any([isinstance(x, (Tensor, NestedTensor)) and x.dtype == torch.float64 for x in tensors])
    dtype = torch.float64 if wide else torch.get_default_dtype()
    return [x.data.to(dtype) if x.number and x.data.is_floating_point() else x.data for x in lanes]
