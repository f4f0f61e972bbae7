"""`tdc.batch`: a function written for one example that also runs on a batch of them."""

from __future__ import annotations

import functools
import inspect
import warnings
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
from tdc.compile._torch.dynamo import CompileId, current_compile, most_compiles
from tdc.compile._torch.levels import has_hooks, load_decompositions
from tdc.compile.upstream import traced
from tdc.core.annotations import python_signature
from tdc.core.arguments import normal_dim
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict, on_rows


class Lanes:
    """A tensor, or tree of tensors, whose dim 0 counts examples; `tdc.lanes` makes one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"lanes({describe(self.value)})"


def lanes(value: Any) -> Lanes:
    """Mark an argument of a function of `batch` as a batch: dim 0 of its tensors counts examples.

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

    A call runs it for all examples where an argument is a batch by its type, else as it is. `map` takes plain tensors.
    As a method, such as `forward` of a module, it is bound as functions are.

    Attributes:
        fn: the function of one example.
        tree: its control tree as text.
        source: the Python code that runs it on a batch in a graph, as text.
        has_ways: True: examples may take different branches, so it runs under no vmap.
    """

    has_ways = True

    def __init__(self, fn: Any, source: str | None = None, options: Options = OPTIONS) -> None:
        self.fn = fn
        self.owner: Any = None
        self._source = read(fn, source)
        self._bind = binder(self._source)
        given, local = [a.arg for a in every_argument(self._source.tree.args)], local_names(self._source)
        roots = {name: name.partition(".")[0] for name in candidates(self._source)}
        self._given_names = tuple([name for name, root in roots.items() if root in given])
        self._free_names = tuple([name for name, root in roots.items() if root not in local])
        self._programs: dict[Answers, Program] = {}
        self._options = options
        self._drivers = Drivers()
        self._number = f"{next(NUMBERS)}"  # a str: a graph might make an int a dynamic size
        FUNCTIONS[self._number] = self
        functools.update_wrapper(self, fn)
        self.__code__ = fn.__code__  # torch.export reads that of a `forward`
        self.program(())

    def __repr__(self) -> str:
        return f"batch({self.fn.__name__})"

    def __get__(self, instance: Any, owner: Any = None) -> BatchFunction:
        return self if instance is None else Method(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of one example, or run it on a batch where an argument is one."""
        given = args if self.owner is None else (self.owner, *args)
        if not any([is_batch(x) for x in (*args, *kwargs.values())]):
            return self.fn(*given, **kwargs)
        return self._run([as_lanes(x) for x in given], {k: as_lanes(x) for k, x in kwargs.items()})

    def map(self, *args: Any, in_dims: Any = 0, **kwargs: Any) -> Any:
        """Run the function on a batch.

        Args:
            in_dims: the dim that counts examples, one for all arguments or a tuple with one for each; None for a shared
                argument. An entry may be a tuple, with one for each part of its argument. It is 0 of keyword arguments.
                Arguments that are not tensors are shared.

        Raises:
            ShapeError: a tensor lacks its dim; numbers of examples differ, or are 0; no argument is a batch.
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
        """The driver that graphs are traced from, as text."""
        return driver_text(self.program(()))[0]

    def program(self, given: tuple[str, ...]) -> Program:
        """The program; `given` are the arguments, and attributes of them, that are functions of `batch` or layers."""
        called = self.all_called(given)
        if called not in self._programs:
            self._programs[called] = build(self._source, called)
        return self._programs[called]

    def all_called(self, given: tuple[str, ...]) -> Answers:
        """Add the names among the present globals and closure variables."""
        return frozenset((*given, *answers(self._free_names, free(self._source, self._free_names))))

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
        """The results of the examples, eagerly; `stack` are the functions that are running."""

        def call(node: Call, group: eager.Group) -> eager.Group:
            callee, args, named = eager.evaluate(node.given, group)
            inner, bound = called(callee, args, named, node.line, stack)
            found = inner._run_group(bound, len(group), device, (*stack, inner.fn))
            return eager.with_values(group, {node.target: found})

        given = answers(self._given_names, values)
        with self._source.located():
            return eager.run_function(self.program(given).nodes, values, count, call, device)

    def _run_masked(
        self, values: dict[str, Any], count: int, device: Any, stack: tuple[Any, ...], m: Any, options: Options
    ) -> Any:
        """Run it in a graph, for the examples of a mask; `options` are those of the calling function."""
        options = options if self._options == OPTIONS else self._options

        def call(given: Any, m: Any, n: int, line: int) -> Any:
            callee, args, named = given
            inner, bound = called(callee, args, named, line, stack)
            return inner._run_masked(bound, n, device, (*stack, inner.fn), m, options)

        run: Callable[..., Any] = getattr(self._drivers, driver_of(self._number, *answers(self._given_names, values)))
        return run(m, count, values, options, call)


class Method(BatchFunction):
    """A function of `batch` as a method of an object. Its attributes are those of the function, whose source Dynamo
    knows (torch 2.13)."""

    def __init__(self, function: BatchFunction, owner: Any) -> None:
        self._functions = (function,)  # in a tuple: Dynamo (torch 2.11) looks for an object with `__get__` in the class
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions[0], name)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature without `self`."""
        whole = python_signature(self.fn)
        return whole.replace(parameters=[*whole.parameters.values()][1:])


FUNCTIONS: WeakValueDictionary[str, BatchFunction] = WeakValueDictionary()  # by number


class Drivers:
    """The drivers of a function as attributes, which Dynamo reads when it needs them."""


@constant
def driver_of(number: str, *given: str) -> str:
    """The name of the driver of a function, which is made while a graph is traced."""
    function = FUNCTIONS[number]
    load_decompositions()
    warn_of_limit(number)
    name = "driver_" + "_".join(sorted(function.all_called(given))).replace(".", "_")
    if not hasattr(function._drivers, name):  # if Dynamo traces a call again, it must find the same code
        setattr(function._drivers, name, driver(function.program(given)))
    return name


FIRST: dict[CompileId, str] = {}  # by compile: the first function that was traced


def warn_of_limit(number: str) -> None:
    """Warn before torch.compile has no room for another function that it is given: it keeps graphs on the code object,
    and all objects that it is given share one (torch 2.11-2.15)."""
    frame, count = current_compile()
    limit = most_compiles()
    if FIRST.setdefault((frame, count), number) != number or count != limit - 1:
        return
    if len({FIRST.get((frame, k)) for k in range(limit)}) > 1:
        expected, got = f"at most {limit} graphs of the functions that torch.compile is given", "the last"
        hint = "tdc.compile.counted(f), or torch.compile(lambda x: f(x)), has graphs of its own"
        warnings.warn(message(OP, expected, got, hint=hint), stacklevel=2)


def called(callee: Any, args: Any, named: Any, line: int, stack: tuple[Any, ...]) -> tuple[BatchFunction, Any]:
    """A called function of `batch`, with its arguments by name.

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
    """The names of functions of `batch`, and those of linear layers with `LAYER` after them."""
    found = [(name, resolved(name, values)) for name in names]
    layers = [name + LAYER for name, x in found if type(x) is torch.nn.Linear and not has_hooks(x)]
    return (*[name for name, x in found if as_batch_function(x) is not None], *layers)


def as_batch_function(x: Any) -> BatchFunction | None:
    """A function of `batch`, or the `forward` of a module that is one."""
    if isinstance(x, torch.nn.Module):
        x = x.forward
    return x if isinstance(x, BatchFunction) else None


def is_batch(x: Any) -> bool:
    """True of an argument that is a batch by its type."""
    if isinstance(x, TensorDict):
        return len(x._size) > 0
    if isinstance(x, Lanes):
        return True
    if isinstance(x, (tuple, list, dict)):
        return any([is_batch(part) for part in (x.values() if isinstance(x, dict) else x)])
    return is_ragged(x)


def as_lanes(x: Any) -> Any:
    """An argument with lanes for batches; anything else is shared."""
    if isinstance(x, (tuple, list, dict)) and is_batch(x):
        return map_leaves(lambda leaf: along(leaf, 0) if is_batch(leaf) else leaf, x)
    return along(x, 0) if is_batch(x) else x


def along(x: Any, dim: Any) -> Any:
    """An argument with lanes for its tensors, along a dim.

    Raises:
        ShapeError: a tensor lacks the dim, or a ragged batch has its examples along another.
        DtypeError: the dim is neither an int nor None nor, for a tuple or list, one for each part.
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
        return on_rows(lambda leaf: map_leaves(lambda part: lane(part, dim), leaf), x)
    leaves, spec = flatten(x)
    return unflatten([lane(leaf, dim) for leaf in leaves], spec)


def lane(leaf: Any, dim: int) -> Any:
    """A leaf as a lane, whose dim 0 counts examples."""
    if isinstance(leaf, Lanes):
        return along(leaf.value, 0)
    if not isinstance(leaf, Tensor) and not is_ragged(leaf):
        return leaf
    if leaf.ndim == 0:
        hint = "None in in_dims for what all examples share"
        raise ShapeError(message(OP, "a tensor with a dim for the examples", describe(leaf), hint=hint))
    dim = normal_dim(dim, leaf.ndim, OP) if dim else 0
    packed: Any = leaf.to_packed() if isinstance(leaf, MaskedBatch) else leaf
    if is_ragged(leaf) and dim != packed.structure.batch_dim:
        got, hint = f"dim {dim} of {describe(leaf)}", f"in_dims={packed.structure.batch_dim} for it"
        raise ShapeError(message(OP, "the dim of a ragged batch that counts its examples", got, hint=hint))
    return lane_of(packed.movedim(dim, 0) if dim else packed)


def count_of(values: dict[str, Any]) -> tuple[int, Any]:
    """The number of examples, and the device of their tensors.

    Raises:
        ShapeError: no argument is a batch, arguments have different numbers of examples, or 0.
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

    `f(x)` of one example runs the function as it is. `f(x)` of a batch by its type (NestedTensor, MaskedBatch,
    TensorDict, or marked by `tdc.lanes`) runs it for all examples, as does `f.map(x, in_dims=0)` of plain tensors. Each
    example gets the result and the gradient that it gets alone: it takes its own branch at each `if`, and its own
    number of rounds, with `break`, `continue` and `return`. Methods, such as `forward`, are decorated as functions are.

    Shapes:
        `(B, ...)` for each argument that is a batch `->` `(B, ...)` for each tensor and number of the result.

    Dtypes:
        Python numbers that differ between examples are int64, bool, or floats as wide as the tensors that they meet;
        among results they are tensors.

    Args:
        fn: the function. Code that cannot be batched is refused when it is decorated, with file and line.
        max_iters: the number of rounds that a `while` has at most where it is unrolled. A compiled training step
            (`lower="auto"`, gradients on) unrolls loops of at most 32.
        lower: how a graph holds loops: "auto" (`scan`, `while_loop`, or unrolled up to `max_iters`), "while" (always
            `while_loop`) or "unroll" (always unrolled; a `while` then needs `max_iters`). Called functions without
            options of their own do the same. Eager code does not use it.
        source: the text of the function, where Python cannot read it: in `exec` and in a bare interpreter.

    Returns:
        A `BatchFunction`, with `fn`, `map`, `tree` and `source`.

    Raises:
        DtypeError: `fn` is not a Python function, `max_iters` not an int, or `lower` not a str.
        ShapeError: `max_iters` is below 1.
        StructureError: an unknown `lower`; a name is read that some examples did not assign.
        UnsupportedError: code that has no meaning for a batch (see docs/batch.md), or whose source cannot be read.

    Compile:
        `torch.compile(f.map, fullgraph=True)`, or any compiled function that calls `f`: one graph for all data, numbers
        of examples and lengths, with nested loops, early returns and calls of other functions of `batch`;
        differentiable. A list that grows in a `while` needs `max_iters`.

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
    """Raise DtypeError, ShapeError or StructureError for wrong options of `batch`."""
    if not isinstance(lower, str):
        raise DtypeError(message(OP, "the name of a lowering", describe(lower), hint='lower="auto"'))
    if lower not in LOWERINGS:
        raise StructureError(message(OP, f"a lowering among {', '.join(LOWERINGS)}", repr(lower), hint='lower="auto"'))
    if max_iters is not None and (not isinstance(max_iters, int) or isinstance(max_iters, bool)):
        got, hint = describe(max_iters), "how often a while runs at most, or None"
        raise DtypeError(message(OP, "an int or None as max_iters", got, hint=hint))
    if max_iters is not None and max_iters < 1:
        hint = "how often a while runs at most, or None"
        raise ShapeError(message(OP, "max_iters of at least 1", repr(max_iters), hint=hint))
