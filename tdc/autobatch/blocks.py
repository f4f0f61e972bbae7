"""A block for the active examples: under vmap, so that it does what it does for one example."""

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
from tdc.autobatch.values import LEAVES, NUMBER_ASKED, NUMBERS, Lane, flatten, is_lane, lane_of, unflatten
from tdc.compile._torch.levels import current_level, map_lanes
from tdc.compile.counts import EXPLAINED
from tdc.compile.upstream import traced
from tdc.core.dynamo import is_batched
from tdc.core.errors import UnsupportedError, message
from tdc.ragged.nested import NestedTensor


def run(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """The tuple that `fn(*args)` returns for each of `count` examples. A result that is equal for all stays one value.

    A block sees one example of a ragged batch, and returns ragged ones of these.
    """
    for x in args:  # loops, not comprehensions: a graph is traced through them faster
        if not isinstance(x, LEAVES):
            leaves, spec = flatten(list(args))
            return run_leaves(of_leaves(fn, spec), leaves, count)
    return run_leaves(fn, args, count)


def of_leaves(fn: Callable[..., Any], form: Any) -> Callable[..., Any]:
    """A function as one of the leaves of its arguments."""
    return lambda *leaves: fn(*unflatten(list(leaves), form))


def run_leaves(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """`run` of leaves."""
    tensors: list[Tensor] = []
    numbers = False
    for x in args:
        if type(x) is Lane and isinstance(x.data, Tensor):
            tensors.append(x.data)
            numbers = numbers or x.number
    if numbers:
        tensors = data_of(args)
    trees: list[Any] = []

    def inner(*given: Tensor) -> Sequence[Any]:
        out = fn(*(given if len(given) == len(args) else examples_of(args, given)))
        for x in out:
            if not isinstance(x, LEAVES):
                leaves, spec = flatten(out)
                trees.append(spec)
                for leaf in leaves if traced() else ():
                    refuse_fields(leaf)
                return leaves
        return out

    found, mapped = map_lanes(inner, tensors, count) if traced() else map_eagerly(inner, tensors, count)
    out: list[Any] = []
    for x, m in zip(found, mapped, strict=True):
        out.append(lane_of(x) if m else lane_of(x.batch) if isinstance(x, RaggedExample) else x)
    return unflatten(out, trees[0]) if trees else out


def examples_of(args: Sequence[Any], given: Sequence[Tensor]) -> list[Any]:
    """Arguments with one example of each lane; `given` are those of dense ones."""
    out: list[Any] = []
    k = 0
    for x in args:
        if type(x) is Lane and isinstance(x.data, Tensor):
            out.append(given[k])
            k += 1
        else:
            out.append(RaggedExample(x.data, current_level()) if type(x) is Lane else x)
    return out


def data_of(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of lanes. Floats of Python are as wide as the widest tensor, so that they widen none."""
    tensors = [x.data if type(x) is Lane else x for x in args if not (type(x) is Lane and x.number)]
    wide = any([isinstance(x, (Tensor, NestedTensor)) and x.dtype == torch.float64 for x in tensors])
    dtype = torch.float64 if wide else torch.get_default_dtype()
    lanes = [x for x in args if is_lane(x)]
    return [x.data.to(dtype) if x.number and x.data.is_floating_point() else x.data for x in lanes]


def map_eagerly(fn: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], count: int) -> Any:
    """`map_lanes` with an error that names what to write instead of code that vmap refuses.

    Raises:
        UnsupportedError: as `SAID` has it; an object among the results holds tensors of one example.
    """
    try:
        found, mapped = map_lanes(fn, tensors, count)
    except RuntimeError as error:
        found = explained(error)
        if found is not None:
            raise found from error
        raise
    for x, is_mapped in zip(found, mapped, strict=True):
        if not is_mapped and not isinstance(x, (Tensor, RaggedExample, *PLAIN)) and holds_example(x):
            raise of_object(type(x).__name__)
    return found, mapped


def explained(error: Exception) -> UnsupportedError | None:
    """The error that names what to write instead of code that vmap refuses; None for another error."""
    for text, expected, got, hint in SAID:
        if text in str(error):
            return UnsupportedError(message(OP, expected, got, hint=hint))
    return None


def explained_in_graphs(error: Any) -> UnsupportedError | None:
    """Explain an error of a trace in the same way, if code that runs in blocks raised it."""
    own = any([frame.filename == __file__ for frame in error.real_stack or ()])
    return explained(error) if own else None


def refuse_fields(x: Any) -> None:
    """Refuse a dataclass with a tensor of one example among its fields; `holds_example` cannot be traced."""
    if not isinstance(x, LEAVES) and is_dataclass(x):
        for name in x.__dataclass_fields__:
            value = getattr(x, name)
            if isinstance(value, RaggedExample) or (isinstance(value, Tensor) and is_batched(value)):
                raise of_object(type(x).__name__)


def of_object(name: str) -> UnsupportedError:
    """The error for an object of a class that leaves its block with tensors of one example."""
    got = f"a {name} that has such a tensor inside, and is needed behind a test or in a loop"
    hint = "make it again where it is used, or keep its tensors in a tuple, dict or TensorDict"
    return UnsupportedError(message(OP, "tensors of an example in trees", got, hint=hint))


PLAIN = (*NUMBERS, str, bytes, type(None), type, ModuleType, torch.nn.Module, torch.dtype, torch.device)


def holds_example(x: Any, depth: int = 5) -> bool:
    """True if an object, such as a function or an iterator, holds a tensor of one example."""
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
    "torch.ones_like(x[:, 0]).cumsum(0) - 1 for torch.arange(T), x.new_zeros(T, 4) for torch.zeros(T, 4), "
    "torch.ones_like(x @ x.mT) for torch.ones(T, T); a table has one size for all examples, torch.zeros(99, 99)",
)  # fmt: skip
SAID = (  # a part of torch's message, and ours
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
    (
        "or scalar, got SymInt", "ints that stay the same beside a number of each example",
        "one that varies between calls, for which torch has no vmap (2.11-2.15)", "pass torch.tensor(n) in its place",
    ),
    ("accessing `data`", "operations that vmap has", "x.data", DETACHED),
    (
        "Batching rule not implemented", "operations that vmap has", "one that it has not, named above",
        "call it on the whole batch, outside",
    ),
)  # fmt: skip

EXPLAINED.append(explained_in_graphs)
