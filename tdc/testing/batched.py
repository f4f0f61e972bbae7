"""assert_batched_equal: a function on a batch gives the results of the function on each example.

A run is a way to run the batch (eagerly, or a graph with some lowering and backend) and an arrangement of the examples:
in order, reversed, with one more, all equal, alone; dense or packed, or padded with poison. Every run is compared with
the same results of the plain function (see `alone`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tdc.autobatch.decorator import FUNCTIONS, BatchFunction, batch, check_options
from tdc.compile.counts import counted
from tdc.core.annotations import python_signature
from tdc.core.arguments import expect_function
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.testing.alone import Alone
from tdc.testing.examples import OP, Examples, captured


def assert_batched_equal(
    fn: Any, examples: Sequence[Any], *, in_dims: Any = 0, grads: bool = True,
    lowers: str | Sequence[str] | None = None, max_iters: int | None = None,
    backends: str | Sequence[Any] = ("eager", "aot_eager"), rtol: float | None = None, atol: float | None = None,
) -> None:  # fmt: skip
    """Assert that a function on a batch gives the results of the function on each example.

    Batches run eagerly and in graphs; with the examples in order, reversed, one more, all equal, and alone. Values,
    dtypes, forms, and the gradients of examples, captured tensors and parameters are compared; each number of each
    example has a weight of its own in the loss. Unless loops are unrolled, one graph must serve all batches of two and
    more examples.

    Args:
        fn: a function of `tdc.batch`, a plain function, or a module whose `forward` is a function of `tdc.batch`.
        examples: a list with the arguments of each example: a tuple, or the one argument. Tensors of one shape are
            stacked; tensors of different lengths are packed, and also padded with poison.
        in_dims: batch dims as of `fn.map`; None for shared arguments.
        grads: compare gradients, too.
        lowers: lowerings of loops as of `tdc.batch`: by default "auto", "while" and, if `max_iters` is known, "unroll".
        max_iters: of unrolled loops, for functions without their own.
        backends: of `torch.compile`; () runs no graph.
        rtol, atol: of values; ten times as much for gradients. By default 3e-5 for float32, 1e-9 for float64, 0 for
            integers.

    Raises:
        AssertionError: every difference, with run, example and key path.
        DtypeError: `fn` is not such a function, `examples` not a list, or an example is a batch.
        ShapeError: no examples; `in_dims` does not fit them.
        StructureError: examples of different forms; unknown lowering.
        UnsupportedError: as `tdc.batch`; unknown backend.

    Compile:
        Calls `torch.compiler.reset()` before it compiles. Some seconds for each backend and lowering.

    Example:
        >>> import tdc
        >>> def halvings(x):
        ...     n = 0
        ...     while x > 1:
        ...         x, n = x / 2, n + 1
        ...     return x, n
        >>> assert_batched_equal(halvings, [torch.tensor(v) for v in (0.5, 3.0, 40.0)], backends=())
    """
    check_arguments(examples, max_iters, lowers, backends)
    f = function_of(fn)
    arguments = [one if isinstance(one, tuple) else (one,) for one in examples]
    names = list(python_signature(plain(f)).parameters)
    given = Examples(arguments, in_dims, names, grads)
    common = captured("", fn) | captured("", given.shared())
    alone = Alone(plain(f), given, common, rtol, atol)
    runs = Runs(f, alone)
    runs.eager()
    bound = max_iters or f._options.max_iters
    for backend in backends_of(backends):
        for lower in lowers_of(lowers, bound):
            with lowered(f, lower, bound):
                runs.graphs(backend, lower)
    runs.report(f.fn.__name__)


def check_arguments(examples: Any, max_iters: Any, lowers: Any, backends: Any) -> None:
    """Refuse other arguments than those of `assert_batched_equal`."""
    hint = "[torch.ones(2), torch.ones(2)], or a tuple for each example"
    if not isinstance(examples, (list, tuple)):
        raise DtypeError(message(OP, "a list of examples", describe(examples), hint=hint))
    if not examples:
        raise ShapeError(message(OP, "at least one example", "none", hint=hint))
    if len({len(one) if isinstance(one, tuple) else 1 for one in examples}) > 1:
        raise ShapeError(message(OP, "one number of arguments", "several", hint="None for an argument left out"))
    for lower in lowers_of(lowers, max_iters):
        check_options(max_iters, lower)
    backends_of(backends)


def backends_of(backends: Any) -> list[Any]:
    """Requested backends."""
    if isinstance(backends, str) or callable(backends):
        return [backends]
    if not isinstance(backends, (tuple, list)):
        raise DtypeError(message(OP, "names of backends", describe(backends), hint='backends=("aot_eager",), or ()'))
    return list(backends)


def lowers_of(lowers: Any, max_iters: int | None) -> list[str]:
    """Requested lowerings."""
    if lowers is None:
        return ["auto", "while", *["unroll"] * (max_iters is not None)]
    if not isinstance(lowers, (str, tuple, list)):
        raise DtypeError(message(OP, "names of lowerings", describe(lowers), hint='lowers=("while",)'))
    return [lowers] if isinstance(lowers, str) else list(lowers)


def function_of(fn: Any) -> BatchFunction:
    """The function of `tdc.batch` of a function or module."""
    if isinstance(fn, nn.Module):
        if not isinstance(fn.forward, BatchFunction):
            got, hint = describe(fn), "@tdc.batch above its forward"
            raise DtypeError(message(OP, "a module whose forward is a function of tdc.batch", got, hint=hint))
        return fn.forward
    expect_function(OP, fn)
    return fn if isinstance(fn, BatchFunction) else batch(fn)


def plain(f: BatchFunction) -> Callable[..., Any]:
    """The function of one example, bound to its object."""
    return f.fn if f.owner is None else f.fn.__get__(f.owner)


@contextmanager
def lowered(f: BatchFunction, lower: str, max_iters: int | None) -> Iterator[None]:
    """A block in which all functions, also called ones, have one lowering."""
    kept = {id(g): (g, g._options) for g in (f, *FUNCTIONS.values())}
    for g, own in kept.values():
        most = own.max_iters or (max_iters if lower == "unroll" else None)
        g._options = replace(own, lower=lower, max_iters=most)
    try:
        yield
    finally:
        for g, own in kept.values():
            g._options = own


class Runs:
    """Runs of a function and their differences, `{text: {way to run: arrangements}}`."""

    def __init__(self, f: BatchFunction, alone: Alone) -> None:
        # a lambda, since Dynamo (torch 2.11) does not find attributes with a `__get__`
        self.run: Callable[..., Any] = lambda *args: f.map(*args, in_dims=alone.examples.in_dims)
        self.alone = alone
        self.wrong: dict[str, dict[str, list[str]]] = {}
        self.error: Exception | None = None
        self.forms = [False, True] if alone.examples.is_ragged() else [False]
        every = list(range(alone.examples.size))
        orders = {
            "in order": every, "reversed": every[::-1], "one more": [*every, 0],
            "all equal": [every[-1]] * max(2, len(every)),
        }  # fmt: skip
        self.several = {name: order for name, order in orders.items() if len(order) > 1}
        self.single = {f"example {i} alone": [i] for i in every}

    def note(self, way: str, name: str, text: str) -> None:
        names = self.wrong.setdefault(text, {}).setdefault(way, [])
        names += [name] * (name not in names)

    def check(self, way: str, run: Callable[..., Any], orders: dict[str, list[int]], padded: bool) -> bool:
        """Run every arrangement in one way; True if all is right. `run` is not `self.run` for graphs."""
        right = True
        for name, order in orders.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Dynamo, which reads `.grad` of arguments, and of vmap
                try:
                    lines = self.alone.differences(run, order, padded, graph=run != self.run)
                except Exception as error:
                    self.error = self.error or error
                    lines = [f"{type(error).__name__}: {str(error).strip().partition(NEWLINE)[0]}"]
            for line in lines:
                self.note(way, name, line)
            right = right and not lines
        return right

    def eager(self) -> None:
        """Run every arrangement eagerly, and every example alone."""
        for padded in self.forms:
            self.check("eager" + PADDED * padded, self.run, self.several | self.single, padded)

    def graphs(self, backend: Any, lower: str) -> None:
        """One graph for all arrangements of several examples, one for an example alone."""
        way = f"graph of {backend if isinstance(backend, str) else describe(backend)}, lower={lower!r}"
        first = dict([*self.single.items()][:1])
        for padded, orders in [*[(padded, self.several) for padded in self.forms], (False, first)]:
            torch.compiler.reset()
            compiled = counted(lambda *args: self.run(*args), backend=backend)
            right = self.check(way + PADDED * padded, compiled, orders, padded)
            compiles = compiled.counts.compiles
            if right and compiles != 1 and lower != "unroll":
                text = f"compiled {compiles} times for {len(orders)} batches, expected once"
                self.note(way + PADDED * padded, ", ".join(orders), text)

    def report(self, name: str) -> None:
        """Raise an AssertionError with all differences."""
        if not self.wrong:
            return
        runs = {t: [f"{way}: {', '.join(names)}" for way, names in ways.items()] for t, ways in self.wrong.items()}
        lines = [f"{text} ({'; '.join(found)})" for text, found in runs.items()]
        got = f"{len(lines)} difference{'s' * (len(lines) > 1)}"
        hint = "backends=() runs eagerly alone; f.tree shows what a batch runs"
        text = message(OP, f"a batch that gives what {name!r} gives each example", got, lines, hint)
        raise AssertionError(text) from self.error


NEWLINE, PADDED = "\n", ", padded"
