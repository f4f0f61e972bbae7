"""`tdc.batch`: a function written for one example that also runs on a batch of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tdc.autobatch import eager
from tdc.autobatch.lists import refuse_returned
from tdc.autobatch.loops import OPTIONS, Options
from tdc.autobatch.program import LAYER, Answers, Program, build, candidates, driver, driver_text, free, resolved
from tdc.autobatch.source import NUMBERS, OP, binder, every_argument, local_names, read
from tdc.autobatch.tree import Call
from tdc.autobatch.values import Lane, as_result, flatten, lane_of, map_leaves, unflatten
from tdc.compile._torch.lanes import has_hooks, load_decompositions
from tdc.compile.upstream import traced
from tdc.core.annotations import python_signature
from tdc.core.arguments import normal_dim
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict


class Lanes:
    """A tensor, or tree of tensors, whose first dim counts examples; `tdc.lanes` makes one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"lanes({describe(self.value)})"


def lanes(value: Any) -> Lanes:
    """Mark an argument of a function of `batch` as a batch: the first dim of its tensors counts examples.

    Args:
        value: a tensor, or a tree of tensors. NestedTensor, MaskedBatch and TensorDict need no mark.

    Example:
        >>> @batch
        ... def steps(x, n=0):
        ...     while x > 1:
        ...         x, n = x / 2, n + 1
        ...     return n
        >>> steps(lanes(torch.tensor([1.0, 8.0, 100.0])))
        tensor([0, 3, 7])

    Source:
        Matchbox's `MaskedBatch`, without masks.
    """
    return Lanes(value)


class BatchFunction:
    """A function of one example that also runs on a batch; `batch` makes one.

    A call runs it for all examples where an argument is a batch by its type, else as it is; so modules whose `forward`
    is one take both. `map` takes plain tensors. As a method it is bound as functions are.

    Attributes:
        fn: the function of one example.
        tree: its control tree as text.
        source: the Python code that runs it on a batch in a graph, as text.
        has_ways: that examples may go different ways through it: it runs under no vmap.
    """

    has_ways = True

    def __init__(self, fn: Any, source: str | None = None, options: Options = OPTIONS) -> None:
        self.fn = fn
        self.owner: Any = None
        self._source = read(fn, source)
        self._bind = binder(self._source)
        given = {arg.arg for arg in every_argument(self._source.tree.args)}
        names, local = candidates(self._source), local_names(self._source)
        self._given_names = tuple([name for name in names if name.partition(".")[0] in given])
        self._free_names = tuple([name for name in names if name.partition(".")[0] not in local])
        self._programs: dict[Answers, Program] = {}
        self._options = options
        self._drivers = Drivers()
        self._number = f"{next(NUMBERS)}"  # as text: a graph might take an int for a size
        FUNCTIONS[self._number] = self
        functools.update_wrapper(self, fn)
        self.__code__ = fn.__code__  # torch.export asks a `forward` where it is
        self.program(())

    def __get__(self, instance: Any, owner: Any = None) -> BatchFunction:
        return self if instance is None else Method(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function of one example as it is, or of a batch where an argument is one."""
        given = args if self.owner is None else (self.owner, *args)
        if not any([is_batch(x) for x in (*args, *kwargs.values())]):
            return self.fn(*given, **kwargs)
        return self._run([as_lanes(x) for x in given], {k: as_lanes(x) for k, x in kwargs.items()})

    def map(self, *args: Any, in_dims: Any = 0, **kwargs: Any) -> Any:
        """The function of a batch.

        Args:
            in_dims: the dim that counts examples, one for all arguments or a tuple with one for each; None for what all
                examples share. An entry may be a tuple, with one for each part of its argument. Keywords have theirs
                in front. What is no tensor is shared.

        Raises:
            ShapeError: a tensor does not have its dim; numbers of examples differ, or are 0; no argument is a batch.
            DtypeError: a dim that is neither an int nor None.

        Compile:
            fullgraph, one graph for all numbers of examples.
        """
        dims = in_dims if isinstance(in_dims, (tuple, list)) else (in_dims,) * len(args)
        if len(dims) != len(args):
            got = f"{len(dims)} for {len(args)} arguments"
            raise ShapeError(message("batch", "one entry of in_dims for each argument", got, hint="None for no dim"))
        given = [along(x, d) for x, d in zip(args, dims, strict=True)]
        owner = [] if self.owner is None else [self.owner]
        return self._run([*owner, *given], {k: along(x, 0) for k, x in kwargs.items()})

    @property
    def tree(self) -> str:
        """The control tree as text."""
        return str(self.program(()))

    @property
    def source(self) -> str:
        """The driver that graphs are traced from."""
        return driver_text(self.program(()))[0]

    def program(self, given: tuple[str, ...]) -> Program:
        """The program; `given` says which arguments, and attributes of them, are functions of `batch` or layers."""
        called = self.all_called(given)
        found = self._programs.get(called)
        if found is None:
            found = self._programs[called] = build(self._source, called)
        return found

    def all_called(self, given: tuple[str, ...]) -> Answers:
        """The same with what globals and closures have now."""
        return frozenset((*given, *answers(self._free_names, free(self._source, self._free_names))))

    def _called(self, values: dict[str, Any]) -> tuple[str, ...]:
        """Which arguments, and attributes of them, are functions of `batch` or layers."""
        return answers(self._given_names, values)

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        values = self._bind(*args, **kwargs)
        count, device = count_of(values)
        if traced():
            found = self._run_masked(values, count, device, (self.fn,), None, OPTIONS)
        else:
            load_decompositions()
            found = self._run_group(values, count, device, (self.fn,))
        refuse_returned(found)
        return as_result(found, count)

    def _run_group(self, values: dict[str, Any], count: int, device: Any, stack: tuple[Any, ...]) -> Any:
        """What each example returns; `stack` are the functions that are running."""

        def call(node: Call, group: eager.Group) -> eager.Group:
            callee, args, named = eager.evaluate(node.given, group)
            inner, bound = called(callee, args, named, node.line, stack)
            found = inner._run_group(bound, len(group), device, (*stack, inner.fn))
            return eager.with_values(group, {node.target: found})

        with self._source.located():
            return eager.run_function(self.program(self._called(values)).nodes, values, count, call, device)

    def _run_masked(
        self, values: dict[str, Any], count: int, device: Any, stack: tuple[Any, ...], m: Any, options: Options
    ) -> Any:
        """The same in a graph, for the examples of a mask; `options` are those of a function that calls this one."""
        options = options if self._options == OPTIONS else self._options

        def call(given: Any, m: Any, n: int, line: int) -> Any:
            callee, args, named = given
            inner, bound = called(callee, args, named, line, stack)
            return inner._run_masked(bound, n, device, (*stack, inner.fn), m, options)

        run: Callable[..., Any] = getattr(self._drivers, driver_of(self._number, *self._called(values)))
        return run(m, count, values, options, call)


class Method(BatchFunction):
    """A function of `batch` as a method of an object. All it has is read from the function: Dynamo knows where that is,
    and takes in no objects of which it does not (torch 2.13)."""

    def __init__(self, function: BatchFunction, owner: Any) -> None:
        self._functions = (function,)  # in a tuple: what has a `__get__` Dynamo (torch 2.11) seeks in the class
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions[0], name)

    @property
    def __signature__(self) -> inspect.Signature:
        """Without `self`, as of a method."""
        whole = python_signature(self.fn)
        return whole.replace(parameters=[*whole.parameters.values()][1:])


FUNCTIONS: WeakValueDictionary[str, BatchFunction] = WeakValueDictionary()  # by number


class Drivers:
    """The drivers of a function, each an attribute: Dynamo reads these when it comes to them."""


@constant
def driver_of(number: str, *given: str) -> str:
    """The name of the driver of a function, which is written while a graph is traced."""
    function = FUNCTIONS[number]
    load_decompositions()
    name = "driver_" + "_".join(sorted(function.all_called(given))).replace(".", "_")
    if not hasattr(function._drivers, name):  # Dynamo may trace a call again, and wants to see the same code
        setattr(function._drivers, name, driver(function.program(given)))
    return name


def called(callee: Any, args: Any, named: Any, line: int, stack: tuple[Any, ...]) -> tuple[BatchFunction, Any]:
    """A function of `batch` that is called, with its arguments by name.

    Raises:
        StructureError: it differs between examples.
        UnsupportedError: it is running already.
    """
    inner = as_batch_function(callee)
    if inner is None:
        got = f"{describe(callee)} at line {line}"
        raise StructureError(message(OP, "one function for all examples", got, hint="decorate it"))
    if inner.fn in stack:
        got, hint = f"{inner.fn.__name__!r} at line {line}", "write it as a loop with a list or a table"
        raise UnsupportedError(message(OP, "calls without recursion", got, hint=hint))
    owner = () if inner.owner is None else (inner.owner,)
    return inner, inner._bind(*owner, *args, **named)


def answers(names: tuple[str, ...], values: dict[str, Any]) -> tuple[str, ...]:
    """The names of functions of `batch`, and those of linear layers, marked as such."""
    found = [(name, resolved(name, values)) for name in names]
    layers = [name + LAYER for name, x in found if type(x) is torch.nn.Linear and not has_hooks(x)]
    return (*[name for name, x in found if as_batch_function(x) is not None], *layers)


def as_batch_function(x: Any) -> BatchFunction | None:
    """A function of `batch`, or the `forward` of a module that is one."""
    if isinstance(x, torch.nn.Module):
        x = x.forward
    return x if isinstance(x, BatchFunction) else None


def is_batch(x: Any) -> bool:
    """Whether an argument is a batch by its type."""
    if isinstance(x, TensorDict):
        return len(x._size) > 0
    if isinstance(x, Lanes):
        return True
    if isinstance(x, (tuple, list, dict)):
        return any([is_batch(part) for part in (x.values() if isinstance(x, dict) else x)])
    return is_ragged(x)


def as_lanes(x: Any) -> Any:
    """An argument with lanes for batches; what is none is shared."""
    if isinstance(x, Lanes):
        return along(x.value, 0)
    if isinstance(x, (tuple, list, dict)) and is_batch(x):
        return map_leaves(lambda leaf: along(leaf, 0) if is_batch(leaf) else leaf, x)
    return along(x, 0) if is_batch(x) else x


def along(x: Any, dim: Any) -> Any:
    """An argument with lanes for its tensors, along a dim.

    Raises:
        ShapeError: a tensor does not have the dim, or a ragged batch has its examples along another.
        DtypeError: the dim is neither an int nor None nor, for a tuple or list, one for each of its parts.
    """
    if isinstance(x, Tensor) and type(dim) is int:  # first, since most arguments are
        return lane(x, dim)
    if isinstance(x, Lanes):
        return along(x.value, 0)
    if dim is None:
        return x
    if isinstance(dim, (tuple, list)):
        if not isinstance(x, (tuple, list)) or len(x) != len(dim):
            got = f"{type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list)) else describe(x)
            hint = "one int, or None, for all of an argument"
            raise ShapeError(message(OP, "one dim for each part of an argument", f"{len(dim)} for {got}", hint=hint))
        parts = [along(part, d) for part, d in zip(x, dim, strict=True)]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if not isinstance(dim, int) or isinstance(dim, bool):
        hint = "in_dims=0, or one entry for each argument: in_dims=(0, None)"
        raise DtypeError(message(OP, "an int or None in in_dims", describe(dim), hint=hint))
    if isinstance(x, TensorDict):
        dim = normal_dim(dim, len(x._size), OP)
    leaves, spec = flatten(x)
    return unflatten([lane(leaf, dim) for leaf in leaves], spec)


def lane(leaf: Any, dim: int) -> Any:
    """A leaf with its examples in front."""
    if isinstance(leaf, Lanes):
        return along(leaf.value, 0)
    if not isinstance(leaf, Tensor) and not is_ragged(leaf):
        return leaf
    if leaf.ndim == 0:
        hint = "None in in_dims for what all examples share"
        raise ShapeError(message(OP, "a tensor with a dim for the examples", describe(leaf), hint=hint))
    dim = normal_dim(dim, leaf.ndim, OP) if dim else 0
    if not is_ragged(leaf):
        return lane_of(leaf.movedim(dim, 0) if dim else leaf)
    return lane_of(examples_in_front(leaf, dim))


def examples_in_front(x: Any, dim: int) -> Any:
    """A ragged batch, packed, with its examples as dim 0.

    Raises:
        ShapeError: another dim counts them.
    """
    packed = x.to_packed() if isinstance(x, MaskedBatch) else x
    batch_dim = packed.structure.batch_dim
    if dim != batch_dim:
        got, hint = f"dim {dim} of {describe(x)}", f"in_dims={batch_dim} for it"
        raise ShapeError(message(OP, "the dim of a ragged batch that counts its examples", got, hint=hint))
    return packed if dim == 0 else packed.movedim(dim, 0)


def count_of(values: dict[str, Any]) -> tuple[int, Any]:
    """How many examples there are, and where their tensors are.

    Raises:
        ShapeError: no argument is a batch, arguments have different numbers of examples, or there are none.
    """
    counts: list[tuple[str, Any]] = []
    device: Any = None
    for name, x in values.items():
        data = [leaf.data for leaf in ([x] if type(x) is Lane else flatten(x)[0]) if type(leaf) is Lane]
        for i, leaf in enumerate(data):
            device = leaf.device if device is None else device
            at = name if len(data) == 1 else f"{name}, tensor {i}"
            counts.append((at, leaf.shape[0]))  # not len(), which is an int in torch.export
    if not counts:
        hint = "tdc.lanes(x) marks a tensor of examples; in_dims=None says that all share an argument"
        raise ShapeError(message(OP, "an argument that is a batch", "only what all examples share", hint=hint))
    first = counts[0][1]
    if any([n != first for _, n in counts[1:]]):
        wrong, hint = {at: f"{n} examples" for at, n in counts}, "None in in_dims for what all examples share"
        raise ShapeError(message(OP, "one number of examples for all arguments", "others", wrong, hint))
    if first == 0:
        hint = "call it only where there are examples"
        raise ShapeError(message(OP, "a batch of at least one example", "an empty one", [at for at, _ in counts], hint))
    return first, device


@overload
def batch(
    fn: Callable[..., Any], *, max_iters: int | None = ..., lower: str = ..., source: str | None = ...
) -> BatchFunction: ...
@overload
def batch(
    *, max_iters: int | None = ..., lower: str = ..., source: str | None = ...
) -> Callable[[Callable[..., Any]], BatchFunction]: ...
def batch(fn: Any = None, *, max_iters: int | None = None, lower: str = "auto", source: str | None = None) -> Any:
    """Let a function that is written for one example run on a batch, control flow included.

    `f(x)` of one example is the function as it is. `f(x)` where an argument is a batch by its type (NestedTensor,
    MaskedBatch, TensorDict, or marked by `tdc.lanes`) runs it for all examples, as does `f.map(x, in_dims=0)` for
    plain tensors. Each example gets what it would get alone: its own way through `if`, `while`, `for`, `break`,
    `continue` and `return`, and its gradient. A method, such as `forward` of a module, is decorated as a function is.

    Shapes:
        `(B, ...)` for each argument that is a batch `->` `(B, ...)` for each tensor and number of the result.

    Dtypes:
        Numbers of Python that differ between examples are int64, bool, or floats as wide as the tensors that they
        meet; among results they are tensors.

    Args:
        fn: the function. What it cannot say is refused when it is decorated, with file and line.
        max_iters: how many rounds a `while` has at most where it is unrolled. A compiled training step (`lower="auto"`,
            gradients on) unrolls loops of at most 32.
        lower: how a graph holds loops: "auto" (`scan`, `while_loop`, or unrolled as `max_iters` says), "while" (always
            `while_loop`) or "unroll" (always unrolled; a `while` then needs `max_iters`). Functions that it calls do
            the same where they say nothing themselves. Eager code does not use it.
        source: the text of the function, where Python cannot read it: in `exec` and in a bare interpreter.

    Returns:
        A `BatchFunction`, with `fn`, `map`, `tree` and `source`.

    Raises:
        DtypeError: `fn` is no Python function; `max_iters` is no int, `lower` no str.
        ShapeError: `max_iters` is below 1.
        StructureError: no such `lower`; a name is read that some examples gave no value.
        UnsupportedError: code that has no meaning for a batch (see docs/batch.md), or whose source cannot be read.

    Compile:
        `torch.compile(f.map, fullgraph=True)`, or any compiled function that calls `f`: one graph, whatever the data
        says, for all numbers of examples and all lengths. Loops in loops, early returns and calls of other functions of
        `batch` included; differentiable. A list that grows in a `while` needs `max_iters`.

    Example:
        >>> @batch
        ... def collatz(n):
        ...     steps = 0
        ...     while n != 1:
        ...         n = n // 2 if n % 2 == 0 else 3 * n + 1
        ...         steps += 1
        ...     return steps
        >>> collatz(6), collatz.map(torch.tensor([1, 6, 7, 27]))
        (8, tensor([  0,   8,  16, 111]))

    Source:
        Matchbox (Bradbury and Fu 2018), whose `batch` rewrote loops with masks.
    """
    check_options(max_iters, lower)
    if fn is None:
        return functools.partial(batch, max_iters=max_iters, lower=lower, source=source)
    return BatchFunction(fn, source, Options(lower, max_iters))


LOWERINGS = ("auto", "while", "unroll")


def check_options(max_iters: Any, lower: Any) -> None:
    """
    Raises:
        DtypeError, ShapeError, StructureError: as `batch`.
    """
    if not isinstance(lower, str):
        got, hint = describe(lower), 'lower="auto"'
        raise DtypeError(message(OP, "the name of a lowering", got, hint=hint))
    if lower not in LOWERINGS:
        raise StructureError(message(OP, f"a lowering among {', '.join(LOWERINGS)}", repr(lower), hint='lower="auto"'))
    if max_iters is not None and (not isinstance(max_iters, int) or isinstance(max_iters, bool)):
        got, hint = describe(max_iters), "how often a while runs at most, or None"
        raise DtypeError(message(OP, "an int or None as max_iters", got, hint=hint))
    if max_iters is not None and max_iters < 1:
        hint = "how often a while runs at most, or None"
        raise ShapeError(message(OP, "max_iters of at least 1", repr(max_iters), hint=hint))
