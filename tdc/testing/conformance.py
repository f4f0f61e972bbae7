"""One call in one mode, compared with a loop over examples; used by `check_rule` and the library's own tests.

    eager      values, dtypes, container, lengths and batch size, on several batches
    grad       the same values without gradients, too, and gradients of every floating operand, under random cotangents
    compile    one graph, no break, for batches of other lengths and sizes; values and gradients are compared
    vmap       batched values, one structure, against one loop for each entry
    export     exported once with every size that varies dynamic, run on the other batches

A mode takes `draw(lengths, seed, grad)`, which makes a case, and the lengths of the batches, and returns differences.

`check_rule` draws NestedTensors and makes the other containers of them: a MaskedBatch whose padding is NaN, so that a
leak shows, or a TensorDict of two leaves of equal rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.compile.counts import counted
from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import UnsupportedError, describe, message
from tdc.core.rules import CLASS_NAMES, DISPATCH, KINDS, MODES, RULES, Rule, name_of
from tdc.ops.extend import USER_RULES, spellings
from tdc.ragged.nested import NestedTensor
from tdc.testing.batches import Cut, Dict, Pairs, Ragged, build, gradients, loop, matched, tensors, unbuild, unequal

OP = "testing.check_rule"

Lengths = tuple[int, ...]
Batches = tuple[Lengths, ...]
AUTO, STATIC = torch.export.Dim.AUTO, torch.export.Dim.STATIC
GRAPHS = {"nested": 1, "masked": 1, "tensordict": 2}  # a TensorDict's batch size becomes dynamic with the second one
LENGTHS: Batches = ((3, 0, 5, 1), (2, 6, 1, 0, 4), (7, 2, 3))


@dataclass
class Case:
    """One call and its expected result.

    Attributes:
        op: the operation as users call it.
        arguments: `(args, kwargs)` with `Ragged`, `Dense` and `Dict` in place of containers.
        want: the result of the loop over examples, in the same form.
        kind: the container that `Ragged` becomes.
        leaves: tensors to differentiate.
        label: name of the case in reports.
        exact: a result requires grad exactly if the loop's does; else it may do so in more cases.
        device: device of the operation; the loop runs on that of its tensors.
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
        """Call the operation; numbers, names and dims are constants."""
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
        """Differences of values and structure, and pairs of tensors."""
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
        """Differences of gradients of the drawn tensors."""
        found = self.cut.back(inner, self.leaves)
        truth = gradients([b for _, _, b in pairs], self.cotangents(pairs), self.leaves, retain=True)
        sides = enumerate(zip(found, truth, strict=True))
        return unequal([(f"gradient of leaf {i}, {list(a.shape)}: ", a, b) for i, (a, b) in sides])


def is_input(x: Any) -> bool:
    """True for arguments of a traced call; other values are constants of the call."""
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
    cases = [draw(batches[0], seed, False) for seed in range(3)]
    flat, specs = zip(*[pytree.tree_flatten(tuple(case.inputs)) for case in cases], strict=True)
    columns = [(parts, all(torch.equal(parts[0], other) for other in parts[1:])) for parts in zip(*flat, strict=True)]
    if all(common for _, common in columns):
        varies = any(t.is_floating_point() and t.numel() for t in flat[0])
        return [f"{cases[0].label}: the same inputs for every seed"] if varies else []
    stacked = pytree.tree_unflatten([parts[0] if common else torch.stack(parts) for parts, common in columns], specs[0])
    in_dims = pytree.tree_unflatten([None if common else 0 for _, common in columns], specs[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # torch loops where it has no batching rule
        out = torch.vmap(cases[0].run, in_dims=in_dims, randomness="different")(*stacked)
    results = [pytree.tree_map(lambda t, k=k: t[k], out) for k in range(len(cases))]
    return [f"vmap of {line}" for case, r in zip(cases, results, strict=True) for line in case.compare(r)]


class Module(torch.nn.Module):
    """A call as a module, which torch.export needs."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def dynamic_sizes(inputs: tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """The dims of one input that vary between batches; for a container a list with one entry for each tensor."""
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


# -- rules of users


def check_rule(
    op: Callable[..., Any], make_args: Callable[[tuple[int, ...]], Any], *, kinds: str | Iterable[str] | None = None,
    modes: str | Iterable[str] | None = None, ref: Callable[..., Any] | None = None,
    lengths: tuple[tuple[int, ...], ...] = LENGTHS, backend: str = "aot_eager",
) -> None:  # fmt: skip
    """Check the rule of an operation against a loop over examples, in every mode that its row promises.

    Args:
        op: the operation, called with containers.
        make_args: `lengths -> args`, NestedTensors with rows of these lengths, and shared tensors and numbers. Called
            under a fixed seed.
        kinds: "nested", "masked", "tensordict"; every kind with a row by default.
        modes: some of "eager", "grad", "compile", "vmap", "export"; those of the row by default.
        ref: the operation on one example, with the same arguments; that of the row by default. An example has one dim
            less: `ref=lambda row, dim: op(row, dim - 1)`, or use negative dims.
        lengths: of the rows of each batch. vmap uses the first batch.
        backend: as of `torch.compile`.

    Raises:
        AssertionError: every difference, with kind, mode, lengths and example.
        UnsupportedError: no row for one of the kinds.

    Compile:
        Calls `torch.compiler.reset()` before it compiles or exports.

    Example:
        >>> from tdc import pack
        >>> check_rule(torch.tanh, lambda lengths: (pack([torch.randn(n, 2) for n in lengths]),), modes="eager")
    """
    given = [kinds] if isinstance(kinds, str) else [k for k in KINDS if op in DISPATCH[k]] if kinds is None else kinds
    found = {kind: rule_of(op, kind) for kind in given}
    for sizes in lengths:
        made_by(make_args, sizes, 0)
    wrong: list[str] = []
    for kind, rule in found.items():
        draw = partial(drawn, op, make_args, ref or rule.ref, kind)
        for mode in (modes,) if isinstance(modes, str) else rule.modes if modes is None else tuple(modes):
            if mode not in CHECKS:
                raise AssertionError(message(OP, f"modes among {', '.join(MODES)}", repr(mode), hint="modes='eager'"))
            try:
                lines = CHECKS[mode](draw, lengths, backend)
            except Exception as error:
                lines = [f"{type(error).__name__}: {error}"]
            wrong += [f"{kind}, {mode}: {line}" for line in lines]
    if wrong:
        results = f"the results of {name_of(op)!r} for each example"
        raise AssertionError(message(OP, results, f"{len(wrong)} differences", wrong, "see tdc.ops.implements"))


def rule_of(op: Any, kind: str) -> Rule:
    """The row of an operation."""
    names = {DISPATCH[kind].get(o) for o in spellings(op)} - {None}
    for rule in reversed([*RULES, *USER_RULES]):
        if rule.kind == kind and DISPATCH[kind].get(rule.op) in names:
            return rule
    got, hint = f"none for {name_of(op)!r}", f"@tdc.ops.implements(op, kinds={kind!r})"
    raise UnsupportedError(message(OP, f"a row for {CLASS_NAMES.get(kind, kind)}", got, hint=hint))


def drawn(op: Any, make_args: Any, ref: Any, kind: str, lengths: Lengths, seed: int, grad: bool) -> Case:
    """The case of one call."""
    leaves: list[Tensor] = []
    args = taken_apart(made_by(make_args, lengths, seed), kind, leaves if grad else None)
    return Case(op, (args, {}), expected(ref, args), kind, leaves, f"lengths {lengths}", exact=False)


def made_by(make_args: Callable[[Lengths], Any], lengths: Lengths, seed: int) -> tuple[Any, ...]:
    """Draw and check the arguments of one call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make_args(lengths)
    args: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    containers: list[Any] = [a for a in args if isinstance(a, Container)]
    if not containers or any(len(c) != len(lengths) for c in containers):
        got = ", ".join([describe(a) for a in args])
        hint = "lambda lengths: (tdc.pack([torch.randn(n, 4) for n in lengths]),)"
        raise AssertionError(message(OP, f"arguments with {len(lengths)} rows of a NestedTensor", got, hint=hint))
    return args


def taken_apart(args: tuple[Any, ...], kind: str, leaves: list[Tensor] | None) -> Any:
    """Arguments as `Ragged` and `Dict`; floating tensors are added to `leaves` if it is a list."""
    shared: dict[int, Ragged] = {}

    def leaf(t: Tensor) -> Tensor:
        if leaves is None or not (t.is_floating_point() or t.is_complex()):
            return t
        leaves.append(t.detach().requires_grad_())
        return leaves[-1]

    def part(x: Any) -> Any:
        if isinstance(x, Ragged):
            return replace(x, rows=[leaf(t) for t in x.rows], kind="" if x.kind == "nested" else x.kind, slack=2)
        if isinstance(x, Dict):
            return Dict({key: part(y) for key, y in x.leaves.items()}, x.size)
        return leaf(x) if isinstance(x, Tensor) else x

    def one(x: Any) -> Any:
        if not isinstance(x, NestedTensor):
            return part(unbuild(x) if isinstance(x, Container) else x)
        if kind == "tensordict":
            data = leaf(x.to_padded().data)
            return Dict({"a": data, ("b", "c"): data.flip(0)}, (len(x),))
        y = replace(part(unbuild(x)), like=shared.get(id(x.structure)), extent=x.structure.extent is not None)
        return shared.setdefault(id(x.structure), y) if y.like is None else y

    return pytree.tree_map(one, args, is_leaf=is_input)


def expected(ref: Callable[..., Any], args: Any) -> Any:
    """The loop over examples, in any layout; for a TensorDict the loop of each of its leaves."""
    dicts = [x for x in pytree.tree_leaves(args) if isinstance(x, Dict)]
    if not dicts:
        return in_any_layout(loop(ref, args, {}))

    def leaf_of(x: Any, key: Any) -> Any:
        y = x.leaves[key] if isinstance(x, Dict) else x
        return Ragged(list(y.unbind())) if isinstance(x, Dict) and isinstance(y, Tensor) else y

    columns = {key: pytree.tree_map(lambda x, key=key: leaf_of(x, key), args) for key in dicts[0].leaves}
    return Dict({key: in_any_layout(loop(ref, column, {})) for key, column in columns.items()}, dicts[0].size)


def in_any_layout(results: list[Any]) -> Any:
    """Results of the examples as one batch, or a batch for each of several results."""
    if isinstance(results[0], (tuple, list)):
        columns = [in_any_layout(list(column)) for column in zip(*results, strict=True)]
        return columns if type(results[0]) is list else tuple(columns)
    return Ragged([torch.as_tensor(r) for r in results], dims=None)
