"""The conformance matrix: one row of the rule table, one sample, one mode; the loop over examples is the truth.

    eager      values, dtype, container, lengths, batch size, on several batches
    grad       gradients of every differentiable operand, under one cotangent for both sides
    compile    one graph, no break, for three batches of other lengths and sizes; forward and backward are compared
    vmap       values mapped, structure common, against one loop for each member
    export     exported once with every size that varies dynamic, run on the other batches

Each mode raises `AssertionError` that names all differences. A mode never skips: what a row cannot do, its `modes` lack
and `check_gap` proves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from batches import Cut, Dense, Dict, Draw, Ragged, build, by, close, differences, gradients, tensors, unbuild
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree

from tdc.core.container import Container
from tdc.core.errors import TdcError
from tdc.core.rules import MODES, Rule
from tdc.testing.rules import Module, dynamic_sizes

Call = tuple[tuple[Any, ...], dict[str, Any]]
EAGER = ((3, 0, 5, 1), (4, 4), (1, 7, 2))
GRAPHS = {"nested": 1, "masked": 1, "tensordict": 2}  # a TensorDict's batch size becomes dynamic with the second one
GAPS_OF_TORCH = (  # what torch says before a rule of ours can
    "Data dependent operator", "must only return Tensors",  # a Python bool in a graph, and under vmap
    "We do not support batching operators that can output dynamic shape",  # nonzero under vmap
    "Cannot call numel() on tensor with symbolic",  # quantile, in torch 2.11
    "aten._ctc_loss.Tensor",  # whose result depends on the lengths
    "Batching rule not implemented",  # in torch 2.11, of a view as another dtype
    "Failed to convert args/kwargs to proxy",  # a function that Dynamo does not hand on to `__torch_function__`
)  # fmt: skip
TRACED = ((3, 0, 5, 1), (2, 6, 1, 0, 4), (7, 2, 3))


def call(*args: Any, **kwargs: Any) -> Call:
    """Arguments of one call."""
    return args, kwargs


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


def examples(tree: Any) -> list[Any]:
    """The arguments of each example, one after another."""
    parts = [x for x in pytree.tree_leaves(tree) if isinstance(x, (Ragged, Dense))]

    def at(i: int) -> Any:
        return pytree.tree_map(lambda x: x.rows[i] if isinstance(x, (Ragged, Dense)) else x, tree)

    return [at(i) for i in range(len(parts[0].rows))]


def loop(ref: Any, args: Any, kwargs: Any) -> list[Any]:
    """The operation on one example after another."""
    return [ref(*a, **k) for a, k in examples((args, kwargs))]


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


@dataclass
class Case:
    """A sample drawn once: tensors and containers going in, and the result of the loop."""

    rule: Rule
    sample: Sample
    lengths: tuple[int, ...]
    seed: int = 0
    grad: bool = False

    def __post_init__(self) -> None:
        draw = Draw(self.rule.kind, self.lengths, self.seed, self.grad)
        args, kwargs = self.sample.draw(draw)
        self.cut = Cut()
        flat, self.spec = pytree.tree_flatten(build((args, kwargs), self.rule.kind, self.cut), is_leaf=is_input)
        self.slots = [is_input(x) for x in flat]
        self.inputs = [x for x in flat if is_input(x)]
        self.constants = [None if is_input(x) else x for x in flat]
        self.method = self.rule.name if getattr(torch.Tensor, self.rule.name, None) is self.rule.op else ""
        self.leaves = draw.leaves
        self.want = self.sample.expect(self.rule.ref, args, kwargs)

    def run(self, *inputs: Any) -> Any:
        """The operation as users call it; numbers, names and dims are constants of the call."""
        it = iter(inputs)
        flat = [next(it) if slot else x for slot, x in zip(self.slots, self.constants, strict=True)]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        if self.method:
            return getattr(args[0], self.method)(*args[1:], **kwargs)
        return self.rule.op(*args, **kwargs)

    def compare(self, result: Any) -> list[str]:
        """Differences of values and structure, and of gradients where the case asks for them."""
        got = unbuild(result)
        wrong = differences(got, self.want, self.rule.kind)
        if not wrong and self.grad:
            wrong = self.compare_gradients(tensors(got), tensors(self.want))
        return [f"{self.sample.label} {self.lengths}: {line}" for line in wrong]

    def compare_gradients(self, got: list[Tensor], want: list[Tensor]) -> list[str]:
        """Gradients of all leaves, under random cotangents that are the same for both sides."""
        free = [t.requires_grad for t in want if t.numel()] != [t.requires_grad for t in got if t.numel()]
        if free:
            return [f"requires_grad {[t.requires_grad for t in got]}, expected {[t.requires_grad for t in want]}"]
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in want]
        ours = self.cut.back(gradients(got, cotangents, self.cut.inner), self.leaves)
        theirs = gradients(want, cotangents, self.leaves, retain=True)
        pairs = enumerate(zip(ours, theirs, self.leaves, strict=True))
        return [
            f"gradient of operand {i}, {list(x.shape)}, differs{by(a, b)}" for i, (a, b, x) in pairs if not close(a, b)
        ]


def is_input(x: Any) -> bool:
    """What a traced call takes as an argument; everything else is a constant of the call."""
    return isinstance(x, (Tensor, Container))


def check_eager(rule: Rule, sample: Sample) -> list[str]:
    cases = [Case(rule, sample, lengths) for lengths in sample.batches]
    return [line for case in cases for line in case.compare(case.run(*case.inputs))]


def check_grad(rule: Rule, sample: Sample) -> list[str]:
    cases = [Case(rule, sample, lengths, grad=True) for lengths in sample.batches]
    return [line for case in cases for line in case.compare(case.run(*case.inputs))]


class Counter:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self.backend: Any = lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(graph, inputs)


def check_compile(rule: Rule, sample: Sample) -> list[str]:
    counter = Counter()
    cases = [Case(rule, sample, lengths, grad=True) for lengths in TRACED]
    compiled = torch.compile(cases[0].run, fullgraph=True, backend=counter)
    wrong = [line for case in cases for line in case.compare(compiled(*case.inputs))]
    if counter.graphs > GRAPHS[rule.kind] or (counter.graphs == 0 and tensors(cases[0].want)):
        wrong.append(f"{sample.label}: {counter.graphs} graphs, expected {GRAPHS[rule.kind]}")
    return wrong


def check_vmap(rule: Rule, sample: Sample) -> list[str]:
    members = [Case(rule, sample, EAGER[0], seed) for seed in range(3)]
    flat, specs = zip(*[pytree.tree_flatten(tuple(case.inputs)) for case in members], strict=True)
    common = [all(torch.equal(parts[0], other) for other in parts[1:]) for parts in zip(*flat, strict=True)]
    columns = zip(common, zip(*flat, strict=True), strict=True)
    mapped = pytree.tree_unflatten([parts[0] if same else torch.stack(parts) for same, parts in columns], specs[0])
    in_dims = pytree.tree_unflatten([None if same else 0 for same in common], specs[0])
    if all(common):
        return []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # torch loops where it has no batching rule
        out = torch.vmap(members[0].run, in_dims=in_dims, randomness="different")(*mapped)
    wrong = []
    for k, case in enumerate(members):
        wrong += case.compare(pytree.tree_map(lambda t, k=k: t[k], out))
    return [f"member {line}" for line in wrong]


def check_export(rule: Rule, sample: Sample) -> list[str]:
    cases = [Case(rule, sample, lengths) for lengths in TRACED]
    shapes = [dynamic_sizes(parts) for parts in zip(*[case.inputs for case in cases], strict=True)]
    program = torch.export.export(
        Module(cases[0].run), tuple(cases[0].inputs), dynamic_shapes={"inputs": tuple(shapes)}
    )
    module = program.module()
    return [line for case in cases for line in case.compare(module(*case.inputs))]


CHECKS: dict[str, Callable[[Rule, Sample], list[str]]] = {
    "eager": check_eager, "compile": check_compile, "vmap": check_vmap, "grad": check_grad, "export": check_export,
}  # fmt: skip


def check(rule: Rule, samples: Iterable[Sample], mode: str) -> None:
    """All samples of a row in one mode.

    Raises:
        AssertionError: some result, structure, gradient or graph count is wrong; every one is named.
    """
    wrong: list[str] = []
    for sample in samples:
        if mode not in sample.modes:
            continue
        if mode in ("compile", "export"):
            torch._dynamo.reset()
        try:
            wrong += CHECKS[mode](rule, sample)
        except Exception as error:
            raise AssertionError(f"{rule} in mode {mode}, sample {sample.label}: {error}") from error
    assert not wrong, "\n".join([f"{rule} in mode {mode}:", *wrong])


def check_gap(rule: Rule, samples: Iterable[Sample], mode: str) -> None:
    """A mode that a row lacks fails there, with an error of the library.

    Raises:
        AssertionError: it works, or fails in another way: the row must say so.
    """
    error = failure(rule, samples, mode)
    assert error is not None, f"{rule} works in mode {mode}: add it to its modes"
    texts = (f"tdc.{rule.name}:", *GAPS_OF_TORCH)
    known = isinstance(error.__cause__, TdcError) or any(text in str(error) for text in texts)
    assert known, f"{rule} fails in mode {mode} without an error of its own: {error}"


def failure(rule: Rule, samples: Iterable[Sample], mode: str) -> AssertionError | None:
    """What `check` says."""
    try:
        check(rule, samples, mode)
    except AssertionError as error:
        return error
    return None
