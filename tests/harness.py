"""The conformance matrix: one row of the rule table, one sample, one mode, through the engine of `tdc.testing`.

A sample draws the arguments of one call, example by example, and says what to expect of the loop over examples. A mode
raises `AssertionError` that names all differences. It never skips: what a row cannot do, its `modes` lack and
`check_gap` proves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree

from tdc.compile.counts import counted
from tdc.core.errors import TdcError
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Dict, Ragged, crop, gradients, loop
from tdc.testing.conformance import CHECKS, GRAPHS, LENGTHS, Case, Module, dynamic_sizes

Call = tuple[tuple[Any, ...], dict[str, Any]]
EAGER = ((3, 0, 5, 1), (4, 4), (1, 7, 2))
DEVICE = os.environ.get("TDC_DEVICE", "cpu")  # where operations run; the loop over examples runs on the CPU
BACKEND = os.environ.get("TDC_BACKEND", "aot_eager")
IN_TORCHS_WORDS = "a call that torch takes"  # an error of ours around one of torch
GAPS_OF_TORCH = (  # what torch says before a rule of ours can
    "Data dependent operator", "must only return Tensors",  # a Python bool in a graph, and under vmap
    "We do not support batching operators that can output dynamic shape",  # nonzero under vmap
    "Cannot call numel() on tensor with symbolic",  # quantile, in torch 2.11
    "aten._ctc_loss.Tensor",  # whose result depends on the lengths
    "aten.geqrf.default",  # which has no fake kernel
    "Batching rule not implemented",  # in torch 2.11, of a view as another dtype
    "Failed to convert args/kwargs to proxy",  # a function that Dynamo does not hand on to `__torch_function__`
)  # fmt: skip


def call(*args: Any, **kwargs: Any) -> Call:
    """Arguments of one call."""
    return args, kwargs


class Layout(NamedTuple):
    """Static dims of a row before and behind its ragged ones."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ragged: int = 1

    @property
    def dims(self) -> tuple[int, ...]:
        first = len(self.before) + 1
        return tuple(range(first, first + self.ragged))


LAYOUTS = {
    "features": Layout((), (3,)), "flat": Layout((), ()), "second": Layout((2,), (3,)), "last": Layout((2,), ()),
    "two": Layout((), (2,), 2),
}  # fmt: skip

Domain = Callable[[tuple[int, ...], torch.Generator], Tensor]
DOMAINS: dict[str, Domain] = {
    "real": lambda shape, g: torch.randn(shape, generator=g),
    "positive": lambda shape, g: torch.rand(shape, generator=g) + 0.5,
    "unit": lambda shape, g: torch.rand(shape, generator=g) * 0.8 + 0.1,
    "whole": lambda shape, g: torch.randint(-2, 3, shape, generator=g).float(),
    "int": lambda shape, g: torch.randint(-4, 5, shape, generator=g),
    "natural": lambda shape, g: torch.randint(1, 5, shape, generator=g),
    "class": lambda shape, g: torch.randint(0, 4, shape, generator=g),
    "bool": lambda shape, g: torch.rand(shape, generator=g) < 0.5,
    "special": lambda shape, g: torch.tensor([0.5, float("nan"), float("inf")])[
        torch.randint(0, 3, shape, generator=g)
    ],
    "half": lambda shape, g: torch.randn(shape, generator=g).bfloat16(),
    "above one": lambda shape, g: torch.rand(shape, generator=g) + 1.5,
    "constant": lambda shape, g: torch.rand(shape, generator=g) + 0.5,
    "large": lambda shape, g: torch.rand(shape, generator=g) + 1.5,
    "bit": lambda shape, g: torch.randint(0, 2, shape, generator=g),
    "coin": lambda shape, g: torch.randint(0, 2, shape, generator=g).float(),
    "complex": lambda shape, g: torch.randn(shape, dtype=torch.complex64, generator=g),
}
FIXED = ("constant", "coin", "large")  # torch has no derivative there


@dataclass(eq=False)
class Draw:
    """Draws the operands of one call for rows of the given lengths; `leaves` are the tensors to differentiate."""

    kind: str
    lengths: tuple[int, ...]
    seed: int = 0
    grad: bool = False
    leaves: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.slack = 2 if self.kind == "masked" else 0

    def tensor(self, *shape: int, domain: str = "real") -> Tensor:
        x = DOMAINS[domain](shape, self.generator)
        if self.grad and x.is_floating_point() and domain not in FIXED:
            self.leaves.append(x.requires_grad_())
        return x

    def sizes(self, layout: Layout, lengths: tuple[int, ...] | None = None) -> list[tuple[int, ...]]:
        """Ragged sizes of each row."""
        first = self.lengths if lengths is None else lengths
        second = [n % 3 + 1 for n in reversed(first)]
        return [pair[: layout.ragged] for pair in zip(first, second, strict=True)]

    def ragged(
        self, layout: str | Layout = "features", domain: str = "real", like: Ragged | None = None, batch_dim: int = 0,
        lengths: tuple[int, ...] | None = None, extent: bool = True,
    ) -> Ragged:  # fmt: skip
        """A ragged batch; with `like` its structure is that very object, else only equal by value."""
        shape = LAYOUTS[layout] if isinstance(layout, str) else layout
        rows = [self.tensor(*shape.before, *n, *shape.after, domain=domain) for n in self.sizes(shape, lengths)]
        dims = tuple(d - (d <= batch_dim) for d in shape.dims)
        return Ragged(rows, dims, batch_dim, like, extent=extent, slack=self.slack)

    def dense(self, layout: str, form: str, domain: str = "real") -> Any:
        """A dense operand for a batch of a layout: a number, or a tensor over features, rows or everything."""
        shape = LAYOUTS[layout]
        sizes = self.sizes(shape)
        if form == "scalar":
            return self.tensor(domain=domain)
        if form == "features":
            return self.tensor(*shape.after, domain=domain)
        if form == "rows":
            ones = [1] * shape.ragged
            whole = self.tensor(len(sizes), *shape.before, *ones, *shape.after, domain=domain)
            return Dense(whole, list(whole.unbind()), (0,))
        longest = [max(column) + self.slack for column in zip(*sizes, strict=True)]
        whole = self.tensor(len(sizes), *shape.before, *longest, *shape.after, domain=domain)
        rows = [crop(x, [d - 1 for d in shape.dims], n) for x, n in zip(whole, sizes, strict=True)]
        return Dense(whole, rows, (0, *shape.dims))


@dataclass(frozen=True)
class Sample:
    """One way to call an operation.

    Attributes:
        label: names the sample in reports.
        draw: the arguments for a draw, in terms of `Ragged`, `Dense`, `Dict` and whatever else the operation takes.
        expect: `(ref, args, kwargs) -> result` in the same terms.
        modes: where the sample applies.
        batches: lengths of the eager batches.
    """

    label: str
    draw: Callable[[Draw], Call]
    expect: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    modes: tuple[str, ...] = MODES
    batches: tuple[tuple[int, ...], ...] = EAGER


def rowwise(ref: Any, args: Any, kwargs: Any) -> Ragged:
    """Expect the loop's results in the layout of the first ragged operand."""
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Ragged))
    return first.with_rows(loop(ref, args, kwargs))


def leafwise(ref: Any, args: Any, kwargs: Any) -> Dict:
    """Expect the operation on each leaf; dense operands speak of batch dims and are extended over features."""
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Dict))

    def at(key: Any, leaf: Tensor) -> Any:
        def one(x: Any) -> Any:
            if isinstance(x, Dict):
                return x.leaves[key]
            wide = isinstance(x, Tensor) and x.ndim
            return x.reshape(*x.shape, *[1] * (leaf.ndim - len(first.size))) if wide else x

        a, k = pytree.tree_map(one, (args, kwargs))
        return ref(*a, **k)

    return Dict({key: at(key, leaf) for key, leaf in first.leaves.items()}, first.size)


def case_of(
    rule: Rule, sample: Sample, lengths: tuple[int, ...], seed: int = 0, grad: bool = False, device: str = DEVICE
) -> Case:
    """A sample drawn once."""
    draw = Draw(rule.kind, lengths, seed, grad)
    args, kwargs = sample.draw(draw)
    want = sample.expect(rule.ref, args, dict(kwargs))
    label = f"{sample.label} {lengths}"
    return Case(spelled(rule), (args, kwargs), want, rule.kind, draw.leaves, label, device=device)


def spelled(rule: Rule) -> Callable[..., Any]:
    """The operation as users call it; methods of `torch.Tensor` are read from the first argument."""
    name = rule.name
    if getattr(torch.Tensor, name, None) is not rule.op:
        return rule.op
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


class Counter:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self.backend: Any = lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(graph, inputs)


def in_turn(sample: Sample) -> tuple[tuple[int, ...], ...]:
    """The first batch of a sample and one of the others, for gradients: values are compared in all of them."""
    first, *others = sample.batches
    return (first, others[len(sample.label) % len(others)]) if others else (first,)


def check(rule: Rule, samples: Iterable[Sample], mode: str) -> None:
    """All samples of a row in one mode.

    Raises:
        AssertionError: some result, structure, gradient or graph count is wrong; every one is named.
    """
    wrong: list[str] = []
    for sample in samples:
        if mode not in sample.modes:
            continue
        try:
            batches = {"eager": sample.batches, "grad": in_turn(sample)}.get(mode, LENGTHS)
            wrong += CHECKS[mode](partial(case_of, rule, sample), batches, BACKEND)
        except Exception as error:
            raise AssertionError(f"{rule} in mode {mode}, sample {sample.label}: {error}") from error
    assert not wrong, "\n".join([f"{rule} in mode {mode}:", *wrong])


Row = tuple[Rule, Sample]


def check_together(rows: Sequence[Row], mode: str) -> None:
    """Samples of several rows in one graph, compiled or exported; where that fails, each alone.

    Raises:
        AssertionError: what is wrong with one of them, or with all in one graph.
    """
    try:
        wrong = TOGETHER[mode](rows)
    except Exception as error:
        wrong = [str(error)]
    if wrong:
        for rule, sample in rows:
            check(rule, [sample], mode)
        raise AssertionError("\n".join([f"in one graph, and not alone, in mode {mode}:", *wrong]))


def compiled_together(rows: Sequence[Row]) -> list[str]:
    torch.compiler.reset()
    batches = [[case_of(*row, lengths, 0, True) for row in rows] for lengths in LENGTHS]
    run, wrong = counted(partial(called, batches[0]), backend=BACKEND), []
    for cases in batches:
        results = run(*[case.inputs for case in cases])
        compared = [case.compare_values(result) for case, result in zip(cases, results, strict=True)]
        wrong += [f"{c.label}: {line}" for c, (lines, _) in zip(cases, compared, strict=True) for line in lines]
        wrong += compared_gradients(cases, [pairs for _, pairs in compared]) if not wrong else []
    allowed = max([GRAPHS[case.kind] for case in batches[0]])
    return wrong if run.counts.compiles <= allowed else [*wrong, f"{run.counts.compiles} compiles, expected {allowed}"]


def compared_gradients(cases: list[Case], pairs: list[Any]) -> list[str]:
    """Differences of gradients, which one backward pass gives for all."""
    wrong = [f"{c.label}: {line}" for c, p in zip(cases, pairs, strict=True) for line in c.compare_flags(p)]
    got = [a for p in pairs for _, a, _ in p]
    seeds = [t for c, p in zip(cases, pairs, strict=True) for t in c.cotangents(p)]
    found = iter(gradients(got, seeds, [leaf for c in cases for leaf in c.cut.inner]))
    for case, p in zip(cases, pairs, strict=True):
        inner = [next(found) for _ in case.cut.inner]
        wrong += [f"{case.label}: {line}" for line in (case.compare_gradients(p, inner) if case.leaves else ())]
    return wrong


def exported_together(rows: Sequence[Row]) -> list[str]:
    torch.compiler.reset()
    batches = [[case_of(*row, lengths) for row in rows] for lengths in LENGTHS]
    same = [list(zip(*[cases[n].inputs for cases in batches], strict=True)) for n in range(len(rows))]
    shapes = tuple([[dynamic_sizes(parts) for parts in inputs] for inputs in same])
    module = Module(partial(called, batches[0]))
    inputs = tuple([case.inputs for case in batches[0]])
    program = torch.export.export(module, inputs, dynamic_shapes={"inputs": shapes}).module()
    calls = [(cases, program(*[case.inputs for case in cases])) for cases in batches]
    return [line for cases, results in calls for c, r in zip(cases, results, strict=True) for line in c.compare(r)]


def called(cases: list[Case], *inputs: list[Any]) -> list[Any]:
    """The results of several calls."""
    return [case.run(*own) for case, own in zip(cases, inputs, strict=True)]


TOGETHER = {"compile": compiled_together, "export": exported_together}


def check_gap(rule: Rule, samples: Iterable[Sample], mode: str) -> None:
    """A mode that a row lacks fails there, with an error of the library.

    Raises:
        AssertionError: it works, or fails in another way: the row must say so.
    """
    error = failure(rule, samples, mode)
    assert error is not None, f"{rule} works in mode {mode}: add it to its modes"
    ours = isinstance(error.__cause__, TdcError) or f"tdc.{rule.name}:" in str(error)
    known = (ours and IN_TORCHS_WORDS not in str(error)) or any(text in str(error) for text in GAPS_OF_TORCH)
    assert known, f"{rule} fails in mode {mode} without an error of its own: {error}"


def failure(rule: Rule, samples: Iterable[Sample], mode: str) -> AssertionError | None:
    """What `check` says."""
    try:
        check(rule, samples, mode)
    except AssertionError as error:
        return error
    return None
