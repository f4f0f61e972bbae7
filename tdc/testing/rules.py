"""That a rule is right: against the loop over examples, in every mode that the row promises.

    eager      values, dtypes, container and lengths, on three batches of other lengths, an empty row among them
    grad       gradients of every floating operand, under random cotangents
    compile    one graph for all three batches; values and gradients are compared
    vmap       values mapped, structure common
    export     exported once with dynamic sizes, run on the other batches

Padding of every padded operand is NaN, so that a leak shows. Arguments are drawn as NestedTensors; the other containers
are made of them: a MaskedBatch, or a TensorDict of two leaves of equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile.counts import counted
from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import UnsupportedError, describe, message
from tdc.core.rules import CLASS_NAMES, DISPATCH, KINDS, MODES, RULES, Rule, name_of
from tdc.ops.extend import USER_RULES, spellings
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.tensordict import TensorDict

LENGTHS = ((3, 0, 5, 1), (2, 6, 1, 0, 4), (7, 2, 3))
AUTO, STATIC = torch.export.Dim.AUTO, torch.export.Dim.STATIC
OP = "testing.check_rule"
Leaves = Sequence[tuple[Tensor, Any]]


def check_rule(
    op: Callable[..., Any],
    make_args: Callable[[tuple[int, ...]], Any],
    *,
    kinds: str | Iterable[str] | None = None,
    modes: str | Iterable[str] | None = None,
    ref: Callable[..., Any] | None = None,
    lengths: tuple[tuple[int, ...], ...] = LENGTHS,
    backend: str = "aot_eager",
) -> None:
    """Prove the rule of an operation as the library proves its own.

    Args:
        op: the operation, called with containers.
        make_args: the arguments for rows of the given lengths, a tuple: NestedTensors with those lengths, and what all
            examples share (tensors, numbers). Called under a fixed seed.
        kinds: "nested", "masked", "tensordict"; every kind with a row by default.
        modes: some of "eager", "grad", "compile", "vmap", "export"; what the row promises by default.
        ref: the operation on one example, with the same arguments; that of the row by default. A dim counts one less
            there: `ref=lambda row, dim: op(row, dim - 1)`, or use negative dims.
        lengths: of the rows of each batch. The first batch serves vmap.
        backend: as of `torch.compile`.

    Raises:
        AssertionError: every difference, with kind, mode, lengths and row.
        UnsupportedError: no row for one of the kinds.

    Compile:
        Calls `torch.compiler.reset()` before it compiles or exports.

    Example:
        >>> from tdc import pack
        >>> check_rule(torch.tanh, lambda lengths: (pack([torch.randn(n, 2) for n in lengths]),), modes="eager")
    """
    found = {kind: rule_of(op, kind) for kind in chosen(op, kinds)}
    wrong: list[str] = []
    for kind, rule in found.items():
        for mode in (modes,) if isinstance(modes, str) else rule.modes if modes is None else tuple(modes):
            if mode not in CHECKS:
                raise AssertionError(message(OP, f"modes among {', '.join(MODES)}", repr(mode), hint="modes='eager'"))
            draws = [Drawn(op, make_args, kind, sizes, ref or rule.ref) for sizes in lengths]
            if mode in ("compile", "export"):
                torch.compiler.reset()
            try:
                lines = CHECKS[mode](draws, backend)
            except Exception as error:
                lines = [f"{type(error).__name__}: {error}"]
            wrong += [f"{kind}, {mode}: {line}" for line in lines]
    if wrong:
        expected = f"the results of {name_of(op)!r} for each example"
        raise AssertionError(message(OP, expected, f"{len(wrong)} differences", wrong, "see tdc.ops.implements"))


def chosen(op: Any, kinds: str | Iterable[str] | None) -> tuple[str, ...]:
    """The kinds to check."""
    if kinds is None:
        return tuple([kind for kind in KINDS if op in DISPATCH[kind]])
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def rule_of(op: Any, kind: str) -> Rule:
    """The row that runs an operation."""
    names = {DISPATCH[kind].get(o) for o in spellings(op)} - {None}
    for rule in reversed([*RULES, *USER_RULES]):
        if rule.kind == kind and DISPATCH[kind].get(rule.op) in names:
            return rule
    got, hint = f"none for {name_of(op)!r}", f"@tdc.ops.implements(op, kinds={kind!r})"
    raise UnsupportedError(message(OP, f"a row for {CLASS_NAMES.get(kind, kind)}", got, hint=hint))


class Drawn:
    """The arguments of one call, and what the loop over examples makes of them."""

    def __init__(self, op: Any, make_args: Any, kind: str, lengths: tuple[int, ...], ref: Any, seed: int = 0) -> None:
        self.recipe = (op, make_args, kind, lengths, ref)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make_args(lengths)
        self.op, self.lengths, self.ref = op, lengths, ref
        self.args = [as_kind(a, kind) for a in (made if isinstance(made, tuple) else (made,))]
        containers: list[Any] = [a for a in self.args if isinstance(a, Container)]
        if not containers or any(len(c) != len(lengths) for c in containers):
            got = ", ".join([describe(a) for a in self.args])
            hint = "lambda lengths: (tdc.pack([torch.randn(n, 4) for n in lengths]),)"
            raise AssertionError(message(OP, f"arguments with {len(lengths)} rows of a NestedTensor", got, hint=hint))
        self.inputs = [a for a in self.args if isinstance(a, (Tensor, Container))]
        self.slots = [isinstance(a, (Tensor, Container)) for a in self.args]
        self.constants = [None if slot else a for a, slot in zip(self.args, self.slots, strict=True)]
        self.first = containers[0]

    def member(self, seed: int) -> Drawn:
        """The same call with other numbers."""
        return Drawn(*self.recipe, seed=seed)

    def run(self, *inputs: Any) -> Any:
        """The operation; what is no tensor is a constant of the call."""
        rest = iter(inputs)
        return self.op(*[next(rest) if slot else x for slot, x in zip(self.slots, self.constants, strict=True)])

    def leaves(self) -> list[tuple[Tensor, Any]]:
        """Make the floating tensors leaves of autograd; each with the mask of where it has a gradient."""
        found: list[tuple[Tensor, Any]] = []

        def one(a: Any) -> Any:
            def leaf(t: Tensor) -> Tensor:
                if not (t.is_floating_point() or t.is_complex()):
                    return t
                found.append((t.detach().requires_grad_(), a.mask if isinstance(a, MaskedBatch) else None))
                return found[-1][0]

            if isinstance(a, NestedTensor):
                return a.with_values(leaf(a.values))
            if isinstance(a, MaskedBatch):
                return a.with_data(leaf(a.data))
            return a.apply(leaf) if isinstance(a, TensorDict) else leaf(a) if isinstance(a, Tensor) else a

        self.args = [one(a) for a in self.args]
        self.inputs = [a for a in self.args if isinstance(a, (Tensor, Container))]
        return found

    def wanted(self) -> list[Any]:
        """The loop: one result for each example; for a TensorDict a dict of its leaves."""
        columns = [examples(a, len(self.lengths)) for a in self.args]
        out = []
        for row in zip(*columns, strict=True):
            tds = [a for a in row if isinstance(a, TensorDict)]
            if not tds:
                out.append(self.ref(*row))
                continue
            paths = tds[0].keys(True, True)
            out.append({p: self.ref(*[a[p] if isinstance(a, TensorDict) else a for a in row]) for p in paths})
        return out

    def compare(self, result: Any, leaves: Leaves = ()) -> list[str]:
        """Every difference of values, and of gradients of the leaves."""
        wanted = self.wanted()
        pairs, wrong = paired(result, wanted, type(self.first), "")
        for at, got, want in pairs:
            wrong += [f"{at}{line}" for line in differences(got, want)]
        if leaves and not wrong:
            wrong = gradients_differ([(got, want) for _, got, want in pairs], leaves)
        return [f"lengths {self.lengths}: {line}" for line in wrong]


def as_kind(x: Any, kind: str) -> Any:
    """A NestedTensor as a container of another kind."""
    if not isinstance(x, NestedTensor) or kind == "nested":
        return x
    if kind == "masked":
        return x.to_padded(poison_of(x), length=tuple([n + 2 for n in x.sizes.amax(0).tolist()]))
    data = x.to_padded().data
    return TensorDict({"a": data, "b": {"c": data.flip(0)}}, (len(x),))


def poison_of(x: NestedTensor) -> float:
    """What padding holds, so that a leak shows."""
    return float("nan") if x.dtype.is_floating_point or x.dtype.is_complex else 77


def examples(x: Any, count: int) -> list[Any]:
    """What each example sees of one argument."""
    if isinstance(x, TensorDict):
        return [x[i] for i in range(count)]
    return list(x.unbind()) if isinstance(x, Container) else [x] * count


def paired(result: Any, wanted: list[Any], container: type, at: str) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """What is to be equal: triples of place, result and wanted tensor; and what has no partner."""
    first = wanted[0] if wanted else None
    if isinstance(first, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(first):
            return [], [f"{at}{describe(result)}, expected {len(first)} results"]
        parts = [paired(r, [w[k] for w in wanted], container, f"{at}result {k}, ") for k, r in enumerate(result)]
    elif isinstance(first, dict):
        if not isinstance(result, TensorDict) or set(result.keys(True, True)) != set(first):
            return [], [f"{at}{describe(result)}, expected a TensorDict of the same keys"]
        parts = [paired(result[p], [w[p] for w in wanted], Tensor, f"{at}{p!r}, ") for p in first]
    else:
        if not isinstance(result, (container, Tensor)):
            return [], [f"{at}{type(result).__name__}, expected {container.__name__} or Tensor"]
        rows = result.unbind() if result.ndim else ()
        if len(rows) != len(wanted):
            return [], [f"{at}{describe(result)}, expected {len(wanted)} rows"]
        return [
            (f"{at}row {i}: ", r, torch.as_tensor(w)) for i, (r, w) in enumerate(zip(rows, wanted, strict=True))
        ], []
    return [p for pairs, _ in parts for p in pairs], [w for _, wrong in parts for w in wrong]


def differences(got: Tensor, want: Tensor) -> list[str]:
    """How a tensor differs from the wanted one."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return [f"{describe(got)}, expected {describe(want)}"]
    tol = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-9}.get(want.dtype, 3e-5)
    return [] if torch.allclose(got, want, rtol=tol, atol=tol, equal_nan=True) else ["other values"]


def gradients_differ(pairs: list[tuple[Tensor, Tensor]], leaves: Leaves) -> list[str]:
    """Gradients of the leaves, of both sides under the same cotangents; what padding gets is garbage."""
    lost = sum(want.requires_grad and not got.requires_grad and want.numel() > 0 for got, want in pairs)
    if lost:
        return [f"no gradient of {lost} results"]
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(want.shape, generator=generator).to(want) for _, want in pairs]
    tensors = [leaf for leaf, _ in leaves]
    sides = [
        [(pair[k], seed) for pair, seed in zip(pairs, seeds, strict=True) if pair[k].requires_grad] for k in (0, 1)
    ]
    ours, theirs = (
        torch.autograd.grad([t for t, _ in side], tensors, [seed for _, seed in side], allow_unused=True)
        if side
        else [None] * len(tensors)
        for side in sides
    )
    wrong = []
    for (leaf, mask), *grads in zip(leaves, ours, theirs, strict=True):
        a, b = (torch.zeros_like(leaf) if g is None else g for g in grads)
        a, b = (a, b) if mask is None else (a.where(mask, 0), b.where(mask, 0))
        wrong += [f"gradient of {describe(leaf)}: {line}" for line in differences(a, b)]
    return wrong


def check_eager(draws: list[Drawn], backend: str) -> list[str]:
    return [line for d in draws for line in d.compare(d.run(*d.inputs))]


def check_grad(draws: list[Drawn], backend: str) -> list[str]:
    return [line for d in draws for leaves in [d.leaves()] for line in d.compare(d.run(*d.inputs), leaves)]


def check_compile(draws: list[Drawn], backend: str) -> list[str]:
    leaves = [d.leaves() for d in draws]
    compiled = counted(draws[0].run, backend=backend)
    wrong = [line for d, free in zip(draws, leaves, strict=True) for line in d.compare(compiled(*d.inputs), free)]
    compiles, allowed = compiled.counts.compiles, 2 if isinstance(draws[0].first, TensorDict) else 1
    return wrong + [f"{compiles} compiles, expected {allowed}"] * (compiles > allowed or not compiles)


def check_vmap(draws: list[Drawn], backend: str) -> list[str]:
    members = [draws[0].member(seed) for seed in range(3)]
    flat, specs = zip(*[pytree.tree_flatten(m.inputs) for m in members], strict=True)
    columns = [(parts, all(torch.equal(parts[0], p) for p in parts)) for parts in zip(*flat, strict=True)]
    stacked = pytree.tree_unflatten([parts[0] if same else torch.stack(parts) for parts, same in columns], specs[0])
    in_dims = pytree.tree_unflatten([None if same else 0 for _, same in columns], specs[0])
    out = torch.vmap(members[0].run, in_dims=tuple(in_dims), randomness="different")(*stacked)
    results = [pytree.tree_map(lambda t, k=k: t[k], out) for k in range(len(members))]
    return [line for m, r in zip(members, results, strict=True) for line in m.compare(r)]


class Module(torch.nn.Module):
    """A call as a module, which export wants."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def check_export(draws: list[Drawn], backend: str) -> list[str]:
    shapes = tuple([dynamic_sizes(parts) for parts in zip(*[d.inputs for d in draws], strict=True)])
    program = torch.export.export(Module(draws[0].run), tuple(draws[0].inputs), dynamic_shapes={"inputs": shapes})
    module = program.module()
    return [line for d in draws for line in d.compare(module(*d.inputs))]


def dynamic_sizes(inputs: tuple[Any, ...]) -> Any:
    """Which sizes of one input vary from batch to batch; a list of that for the tensors of a container."""
    if isinstance(inputs[0], Container):
        return [dynamic_sizes(parts) for parts in zip(*[pytree.tree_leaves(x) for x in inputs], strict=True)]
    return tuple([AUTO if len(set(sizes)) > 1 else STATIC for sizes in zip(*[x.shape for x in inputs], strict=True)])


CHECKS: dict[str, Callable[[list[Drawn], str], list[str]]] = {
    "eager": check_eager, "grad": check_grad, "compile": check_compile, "vmap": check_vmap, "export": check_export,
}  # fmt: skip
