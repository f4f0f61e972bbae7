"""assert_batched_equal: a function on a batch gives the results of the function on each example.

A run is a way to run the batch (eagerly, or a graph with some lowering and backend) and an arrangement of the examples:
in order, reversed, with one more, all equal, alone; dense or packed, or padded with poison. Every run is compared with
the same results of the plain function on each example, `Alone`.

The loss of a batch is a weighted sum of all numbers of its results, with weights of their own for each example. So
errors of several examples do not cancel, and the gradients of a batch are sums of those of its examples, in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from tdc.autobatch.decorator import FUNCTIONS, BatchFunction, batch, check_options
from tdc.compile.counts import counted
from tdc.core import pytree
from tdc.core.annotations import python_signature
from tdc.core.arguments import expect_function
from tdc.core.dtypes import is_inexact
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import is_ragged, with_data
from tdc.testing.batches import TOLERANCE, gradients
from tdc.testing.close import mismatches
from tdc.testing.examples import OP, Examples, Given, captured, rows

Pair = tuple[list[Tensor], list[Tensor]]
LONGER = 10  # tolerance of gradients over that of values: gradients are longer sums
NEWLINE, PADDED = "\n", ", padded"


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


# -- each example alone


@dataclass(frozen=True)
class One:
    """Result of one example, weights of its floating leaves by position, gradients of its own and shared tensors."""

    result: Any
    weights: dict[int, Tensor]
    own: dict[str, Tensor]
    common: dict[str, Tensor]


class Alone:
    """Results of a function on each example; `differences` compares a batch with them.

    Args:
        fn: the function of one example.
        common: shared tensors by name.
        rtol, atol: None for those of the dtypes.
    """

    def __init__(
        self, fn: Callable[..., Any], examples: Examples, common: dict[str, Tensor],
        rtol: float | None = None, atol: float | None = None,
    ) -> None:  # fmt: skip
        self.examples = examples
        self.common = common if examples.grads else {}
        self.rtol, self.atol = rtol, atol
        self.ones = [self._one(fn, i) for i in range(examples.size)]

    def _one(self, fn: Callable[..., Any], i: int) -> One:
        given = self.examples.alone(i)
        with torch.set_grad_enabled(self.examples.grads):
            result = fn(*given.args)
        leaves = pytree.tree_leaves(result, is_leaf=is_ragged)
        generator = torch.Generator().manual_seed(i)
        weights = {
            k: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            for k, x in enumerate(leaves) if is_inexact(x)
        }  # fmt: skip
        asked = {**given.leaves, **self.common}
        found = gradients([leaves[k] for k in weights], list(weights.values()), list(asked.values()))
        by_name = dict(zip(asked, found, strict=True))
        own, common = [{name: by_name[name] for name in part} for part in (given.leaves, self.common)]
        detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)
        return One(detached, weights, own, common)

    def differences(
        self, run: Callable[..., Any], order: Sequence[int], padded: bool = False, graph: bool = False
    ) -> list[str]:
        """Run a batch of some examples, and compare. A graph has the dtypes of all examples, not only of these."""
        given = self.examples.batch(order, padded, graph)
        with torch.set_grad_enabled(self.examples.grads):
            found = run(*given.args)
        wrong = not_of_size(found, len(order))
        if wrong:
            return wrong
        taken = taken_apart(found, len(order))
        dtypes = self.dtypes(range(len(self.ones)) if graph else order)
        for at, i in enumerate(order):
            result = expected(taken[at], self.ones[i].result, dtypes)
            label = self.label(order, at)
            for path, text in mismatches(taken[at], result, (), self.compare(1)):
                wrong.append(f"{label}, {'.'.join(('value', *path))}: {text}")
        comparable = [fits(x, self.ones[i].result) for x, i in zip(taken, order, strict=True)]
        if not self.examples.grads or not all(comparable):
            return wrong
        return wrong + self.gradients(run, taken, given, order, padded, graph)

    def label(self, order: Sequence[int], at: int) -> str:
        """Name of an example of a batch in reports."""
        i = order[at]
        return f"example {i}" if order.count(i) == 1 else f"example {i} in place {at}"

    def compare(self, times: int) -> Callable[[Any, Any], None]:
        """A function that raises if two tensors differ; integers must be equal."""

        def close(a: Any, b: Any) -> None:
            own = TOLERANCE.get(a.dtype, 3e-5) if is_inexact(a) else 0.0
            rtol, atol = [(own if t is None else t) * times * is_inexact(a) for t in (self.rtol, self.atol)]
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)

        return close

    def dtypes(self, order: Sequence[int]) -> list[Any]:
        """The common dtype of each leaf of the results; [] for trees of several forms."""
        flat = [pytree.tree_flatten(self.ones[i].result, is_leaf=is_ragged) for i in order]
        if any([spec != flat[0][1] for _, spec in flat]):
            return []
        return [common_dtype(column) for column in zip(*[leaves for leaves, _ in flat], strict=True)]

    # -- gradients

    def gradients(
        self, run: Callable[..., Any], taken: list[Any], given: Given, order: Sequence[int], padded: bool,
        graph: bool,
    ) -> list[str]:  # fmt: skip
        """All differences of the gradients of a batch."""
        asked = [*given.leaves.values(), *self.common.values()]
        found = gradients(*self.loss(taken, order), asked)
        own = dict(zip(given.leaves, found, strict=False))
        common = dict(zip(self.common, found[len(own) :], strict=True))
        wrong: list[str] = []
        for name, gradient in own.items():
            whole = with_data(given.whole[name], gradient)
            for at, (row, i) in enumerate(zip(rows(whole, given.dims[name]), order, strict=True)):
                wrong += self.unequal(f"{self.label(order, at)}, gradient of {name}", row, self.ones[i].own[name])
            if isinstance(whole, MaskedBatch) and bool((whole.data != whole.filled(0)).any()):
                wrong.append(f"gradient of {name}: padding has one")
        for name, gradient in common.items():
            truth = sum([self.ones[i].common[name] for i in order], torch.zeros_like(gradient))
            text = self.unequal(f"gradient of {name}", gradient, truth)
            wrong += text and [f"{text[0]}{self.through(name, run, order, padded, graph)}"]
        return wrong

    def loss(self, taken: list[Any], order: Sequence[int], only: int | None = None) -> Pair:
        """The numbers of a batch and their weights, 0 for all examples but `only` if it is given."""
        outs: list[Tensor] = []
        weights: list[Tensor] = []
        for at, (x, i) in enumerate(zip(taken, order, strict=True)):
            leaves = pytree.tree_leaves(x, is_leaf=is_ragged)
            for k, weight in self.ones[i].weights.items():
                outs.append(leaves[k])
                weights.append((weight if only in (None, at) else torch.zeros_like(weight)).to(leaves[k].dtype))
        return outs, weights

    def through(self, name: str, run: Callable[..., Any], order: Sequence[int], padded: bool, graph: bool) -> str:
        """Examples through which a gradient is wrong."""
        found = []
        for at, i in enumerate(order):
            given = self.examples.batch(order, padded, graph)
            taken = taken_apart(run(*given.args), len(order))
            (gradient,) = gradients(*self.loss(taken, order, at), [self.common[name]])
            found += [self.label(order, at)] * bool(self.unequal("", gradient, self.ones[i].common[name]))
        return f", through {', '.join(found)}" if found else ""

    def unequal(self, label: str, a: Tensor, b: Tensor) -> list[str]:
        return [f"{label}: {text}" for _, text in mismatches(a, b, (), self.compare(LONGER))]


def not_of_size(x: Any, size: int) -> list[str]:
    """Leaves of a batch with another number of examples."""
    wrong = []
    for path, leaf in pytree.tree_flatten_with_path(x, is_leaf=is_ragged)[0]:
        if isinstance(leaf, Tensor) or is_ragged(leaf):
            found = len(leaf) if is_ragged(leaf) or leaf.ndim else None
            if found != size:
                wrong.append(f"value{pytree.keystr(path)}: {describe(leaf)}, expected {size} examples")
        elif isinstance(leaf, Number):
            wrong.append(f"value{pytree.keystr(path)}: {describe(leaf)}, expected a tensor of {size} examples")
    return wrong


def taken_apart(x: Any, size: int) -> list[Any]:
    """Split the results of a batch into those of its examples."""
    leaves, spec = pytree.tree_flatten(x, is_leaf=is_ragged)
    columns = [rows(leaf) if isinstance(leaf, Tensor) or is_ragged(leaf) else [leaf] * size for leaf in leaves]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(size)]


def common_dtype(column: Sequence[Any]) -> torch.dtype | None:
    """The common dtype of one leaf of the examples; None for Python floats, which take that of the other operand."""
    tensors = [x.dtype for x in column if isinstance(x, Tensor)]
    numbers: list[Any] = [x for x in column if isinstance(x, Number)]
    if not tensors:
        dtype = reduce(torch.promote_types, [torch.as_tensor(x).dtype for x in numbers], torch.bool)
        return None if dtype.is_floating_point else dtype
    dtype = reduce(torch.promote_types, tensors)
    return reduce(torch.promote_types, [torch.result_type(torch.empty(1, dtype=dtype), x) for x in numbers], dtype)


def expected(found: Any, result: Any, dtypes: list[Any]) -> Any:
    """The result of one example as in a batch: numbers are tensors, dtypes are those of all examples together."""
    ours, spec = pytree.tree_flatten(found, is_leaf=is_ragged)
    leaves, own = pytree.tree_flatten(result, is_leaf=is_ragged)
    if spec != own or not dtypes:
        return result

    def leaf(x: Any, like: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(x, (Tensor, Number)):
            return x
        if dtype is None:
            dtype = like.dtype if is_inexact(like) else torch.get_default_dtype()
        return torch.as_tensor(x, dtype=dtype, device=getattr(like, "device", None))

    return pytree.tree_unflatten([leaf(*each) for each in zip(leaves, ours, dtypes, strict=True)], spec)


def fits(found: Any, result: Any) -> bool:
    """True if gradients of a result of the batch can be compared with those of the example."""
    ours, spec = pytree.tree_flatten(found, is_leaf=is_ragged)
    leaves, own = pytree.tree_flatten(result, is_leaf=is_ragged)
    pairs = zip(ours, leaves, strict=False)
    return spec == own and all(not is_inexact(b) or (is_inexact(a) and a.shape == b.shape) for a, b in pairs)
