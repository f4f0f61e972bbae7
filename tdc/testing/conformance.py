"""One call in one mode, against the loop over examples: what the library's own tests and `check_rule` run.

    eager      values, dtypes, container, lengths and batch size, on several batches
    grad       the same values without gradients, too, and gradients of every floating operand, under random cotangents
    compile    one graph, no break, for batches of other lengths and sizes; values and gradients are compared
    vmap       values mapped, structure common, against one loop for each member
    export     exported once with every size that varies dynamic, run on the other batches

A mode takes `draw`, which makes the case for lengths, a seed, and whether to differentiate, and the lengths of the
batches. It returns every difference that it finds, and never skips.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tdc.compile.counts import counted
from tdc.core import pytree
from tdc.core.container import Container
from tdc.testing.batches import Cut, Pairs, build, gradients, matched, tensors, unbuild, unequal

Lengths = tuple[int, ...]
Batches = tuple[Lengths, ...]
AUTO, STATIC = torch.export.Dim.AUTO, torch.export.Dim.STATIC
GRAPHS = {"nested": 1, "masked": 1, "tensordict": 2}  # a TensorDict's batch size becomes dynamic with the second one
LENGTHS: Batches = ((3, 0, 5, 1), (2, 6, 1, 0, 4), (7, 2, 3))


@dataclass
class Case:
    """One call: what goes in, and what the loop over examples makes of it.

    Attributes:
        op: the operation as users call it.
        arguments: `(args, kwargs)` in terms of `Ragged`, `Dense`, `Dict` and whatever else the operation takes.
        want: the result, in the same terms.
        kind: the container that `Ragged` becomes.
        leaves: the tensors to differentiate; gradients are compared where there are any.
        label: names the case in reports.
        exact: whether a result requires grad just where the loop's does, not only at least there.
        device: where the operation runs; the loop over examples runs where its tensors are.
    """

    op: Callable[..., Any]
    arguments: Any
    want: Any
    kind: str
    leaves: list[Tensor] = field(default_factory=list)
    label: str = ""
    exact: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.cut = Cut()
        flat, self.spec = pytree.tree_flatten(build(self.arguments, self.kind, self.cut, self.device), is_leaf=is_input)
        self.slots = [is_input(x) for x in flat]
        self.inputs = [x for x in flat if is_input(x)]
        self.constants = [None if is_input(x) else x for x in flat]

    def run(self, *inputs: Any) -> Any:
        """The operation; numbers, names and dims are constants of the call."""
        rest = iter(inputs)
        flat = [next(rest) if slot else x for slot, x in zip(self.slots, self.constants, strict=True)]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return self.op(*args, **kwargs)

    def compare(self, result: Any) -> list[str]:
        """Differences of values and structure, else of gradients."""
        wrong, pairs = self.compare_values(result)
        if not wrong and self.leaves:
            wrong = self.compare_flags(pairs) or self.compare_gradients(
                pairs, gradients([a for _, a, _ in pairs], self.cotangents(pairs), self.cut.inner)
            )
        return [f"{self.label}: {line}" for line in wrong]

    def compare_values(self, result: Any) -> tuple[list[str], Pairs]:
        """Differences of values and structure, and the tensors of both sides."""
        if self.device != "cpu":
            result = pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)
        wrong, pairs = matched(unbuild(result), self.want, self.kind)
        pairs = [(at, a, b.to(a.device)) for at, a, b in pairs]
        return wrong + unequal(pairs), pairs

    def compare_flags(self, pairs: Pairs) -> list[str]:
        """Differences in which results require grad."""
        got, want = [a for _, a, _ in pairs], [b for _, _, b in pairs]
        ours, theirs = [[t.requires_grad for t in side] for side in (got, want)]
        if any(b.numel() and x != y and (y or self.exact) for b, x, y in zip(want, ours, theirs, strict=True)):
            return [f"requires_grad {ours}, expected {theirs}"]
        return []

    def cotangents(self, pairs: Pairs) -> list[Tensor]:
        """Random cotangents, the same for both sides."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(b.shape, generator=generator).to(b) for _, _, b in pairs]

    def compare_gradients(self, pairs: Pairs, inner: list[Tensor]) -> list[str]:
        """Differences of gradients of the drawn tensors, from those of what was made of them."""
        found = self.cut.back(inner, self.leaves)
        truth = gradients([b for _, _, b in pairs], self.cotangents(pairs), self.leaves, retain=True)
        sides = enumerate(zip(found, truth, strict=True))
        return unequal([(f"gradient of leaf {i}, {list(a.shape)}: ", a, b) for i, (a, b) in sides])


def is_input(x: Any) -> bool:
    """What a traced call takes as an argument; everything else is a constant of the call."""
    return isinstance(x, (Tensor, Container))


def check_eager(draw: MakeCase, batches: Batches, backend: str) -> list[str]:
    cases = [draw(lengths, 0, False) for lengths in batches]
    return [line for case in cases for line in case.compare(case.run(*case.inputs))]


def check_grad(draw: MakeCase, batches: Batches, backend: str) -> list[str]:
    wrong: list[str] = []
    for case in [draw(lengths, 0, True) for lengths in batches]:
        with torch.no_grad():
            alone, _ = case.compare_values(case.run(*case.inputs))
        wrong += [f"{case.label}, without gradients: {line}" for line in alone] or case.compare(case.run(*case.inputs))
    return wrong


def check_compile(draw: MakeCase, batches: Batches, backend: str) -> list[str]:
    torch.compiler.reset()
    cases = [draw(lengths, 0, True) for lengths in batches]
    compiled = counted(cases[0].run, backend=backend)
    wrong = [line for case in cases for line in case.compare(compiled(*case.inputs))]
    compiles, allowed = compiled.counts.compiles, GRAPHS[cases[0].kind]
    if compiles > allowed or (compiles == 0 and tensors(cases[0].want)):
        wrong.append(f"{cases[0].label}: {compiles} compiles, expected {allowed}")
    return wrong


def check_vmap(draw: MakeCase, batches: Batches, backend: str) -> list[str]:
    members = [draw(batches[0], seed, False) for seed in range(3)]
    flat, specs = zip(*[pytree.tree_flatten(tuple(case.inputs)) for case in members], strict=True)
    columns = [(parts, all(torch.equal(parts[0], other) for other in parts[1:])) for parts in zip(*flat, strict=True)]
    if all(common for _, common in columns):
        varies = any(t.is_floating_point() and t.numel() for t in flat[0])
        return [f"{members[0].label}: the same inputs for every seed"] if varies else []
    stacked = pytree.tree_unflatten([parts[0] if common else torch.stack(parts) for parts, common in columns], specs[0])
    in_dims = pytree.tree_unflatten([None if common else 0 for _, common in columns], specs[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # torch loops where it has no batching rule
        out = torch.vmap(members[0].run, in_dims=in_dims, randomness="different")(*stacked)
    results = [pytree.tree_map(lambda t, k=k: t[k], out) for k in range(len(members))]
    return [f"member {line}" for case, r in zip(members, results, strict=True) for line in case.compare(r)]


class Module(torch.nn.Module):
    """A call as a module, which export wants."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def dynamic_sizes(inputs: tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """Which sizes of one input vary from batch to batch; a list of that for the tensors of a container."""
    if isinstance(inputs[0], Container):
        return [dynamic_sizes(parts) for parts in zip(*[pytree.tree_leaves(x) for x in inputs], strict=True)]
    return tuple([AUTO if len(set(sizes)) > 1 else STATIC for sizes in zip(*[x.shape for x in inputs], strict=True)])


def check_export(draw: MakeCase, batches: Batches, backend: str) -> list[str]:
    torch.compiler.reset()
    cases = [draw(lengths, 0, False) for lengths in batches]
    shapes = tuple([dynamic_sizes(parts) for parts in zip(*[case.inputs for case in cases], strict=True)])
    inputs = tuple(cases[0].inputs)
    module = torch.export.export(Module(cases[0].run), inputs, dynamic_shapes={"inputs": shapes}).module()
    return [line for case in cases for line in case.compare(module(*case.inputs))]


MakeCase = Callable[[Lengths, int, bool], Case]
CHECKS: dict[str, Callable[[MakeCase, Batches, str], list[str]]] = {
    "eager": check_eager, "compile": check_compile, "vmap": check_vmap, "grad": check_grad, "export": check_export,
}  # fmt: skip
