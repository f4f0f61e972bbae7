"""Runs a random program on a batch and, as a loop, on its examples, and compares values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from autobatch.generate import SIZE, Program
from torch import Tensor

import tdc
from tdc.autobatch.decorator import BatchFunction, batch, lanes
from tdc.core import pytree

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
TOLERANCE = {True: (1e-9, 1e-8), False: (1e-5, 1e-4)}  # of values and of gradients, by whether the program is float64


@dataclass
class Inputs:
    """What a program is run with: the arguments of each example, and tensors that all capture."""

    x: list[Tensor]
    v: list[Tensor]
    n: list[Tensor]
    xs: list[Tensor]
    ys: list[Tensor]
    w: Tensor
    c: Tensor

    def leaves(self, shared: bool) -> list[Tensor]:
        """All that gradients are taken with respect to."""
        return [*self.x, *(self.v[:1] if shared else self.v), *self.xs, *self.ys, self.w, self.c]


def inputs(p: Program) -> Inputs:
    """The inputs of a program."""
    g = torch.Generator().manual_seed(p.seed)
    dtype = torch.float64 if p.double else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    many = range(p.size)
    lengths = torch.randint(0, 5, (p.size,), generator=g).tolist() if p.rows != "static" else [SIZE] * p.size
    v = [draw(SIZE)] * p.size if p.style == "shared" else [draw(SIZE) for _ in many]
    n = [torch.randint(0, 5, (), generator=g) for _ in many]
    xs, ys = [draw(t, SIZE) for t in lengths], [draw(t) for t in lengths]
    return Inputs([draw() for _ in many], v, n, xs, ys, draw(SIZE), draw())


def functions(p: Program, given: Inputs) -> BatchFunction:
    """The function of a program, with its helper."""
    helper = made(p.helper, given, None)
    return made(p.text, given, helper)


def made(text: str, given: Inputs, other: Any) -> BatchFunction:
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<random program>", "exec"), scope)
    return batch(scope["make"](given.w, given.c, True, other), source=text)


def looped(f: BatchFunction, given: Inputs) -> list[Any]:
    """The results of the examples, one after the other."""
    rows = zip(given.x, given.v, given.n, given.xs, given.ys, strict=True)
    return [f.fn(*row) for row in rows]


def batched(f: BatchFunction, p: Program, given: Inputs, compiler: Compiler | None) -> Any:
    """The result of the batch."""
    x, v, n = [torch.stack(parts) for parts in (given.x, given.v, given.n)]
    xs, ys = [rows_of(parts, p.rows) for parts in (given.xs, given.ys)]
    if p.style == "lanes":
        static = [lanes(part) if p.rows == "static" else part for part in (xs, ys)]
        return f(lanes(x), lanes(v), lanes(n), *static)
    dims: Any = 0
    if p.style == "shared":
        v, dims = given.v[0], (0, None, 0, 0, 0)
    elif p.style == "moved":
        v, dims = v.movedim(0, 1), (0, 1, 0, 0, 0)
    run = f.map if compiler is None else compiler(f.map)
    return run(x, v, n, xs, ys, in_dims=dims)


def rows_of(parts: list[Tensor], kind: str) -> Any:
    """Rows of all examples as one argument."""
    if kind == "static":
        return torch.stack(parts)
    packed = tdc.pack(parts)
    return packed if kind == "ragged" else packed.to_padded()


def check(p: Program, compiler: Compiler | None = None) -> int:
    """Compare the batch with the loop. Returns how many gradients were not zero.

    Raises:
        AssertionError: a value or a gradient differs.
    """
    given = inputs(p)
    f = functions(p, given)
    alone = looped(f, given)
    whole = batched(f, p, given, compiler)
    values, gradients = TOLERANCE[p.double]
    found, spec = pytree.tree_flatten(whole)
    expected = [pytree.tree_flatten(one) for one in alone]
    for _, one in expected:
        assert one == spec, f"form {spec}, expected {one}"
    columns = [list(column) for column in zip(*[leaves for leaves, _ in expected], strict=True)]
    for i, (leaf, column) in enumerate(zip(found, columns, strict=True)):
        same(f"value {i}", leaf, column, values)
    stacked = [torch.stack([torch.as_tensor(x) for x in column]) for column in columns if is_float(column)]
    chosen = [leaf for leaf, column in zip(found, columns, strict=True) if is_float(column)]
    leaves = given.leaves(p.style == "shared")
    a, b = derivatives(chosen, leaves), derivatives(stacked, leaves)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        torch.testing.assert_close(one, other, rtol=gradients, atol=gradients, msg=lambda m, i=i: f"gradient {i}: {m}")
    return sum([bool(x.abs().sum() > 0) for x in b])


def is_float(column: list[Any]) -> bool:
    """Whether the examples have tensors of floats."""
    return all([isinstance(x, Tensor) and x.is_floating_point() for x in column])


def same(name: str, leaf: Any, column: list[Any], tolerance: float) -> None:
    """One leaf of the batch beside those of the examples; of what are tensors for all of them, dtypes too."""
    assert isinstance(leaf, Tensor), f"{name}: {type(leaf).__name__}"
    expected = [torch.as_tensor(x) for x in column]
    if all([isinstance(x, Tensor) for x in column]):
        assert leaf.dtype == expected[0].dtype, f"{name}: {leaf.dtype}, expected {expected[0].dtype}"
    assert not any([x.isnan().any() for x in expected]), f"{name}: an example alone gives NaN"
    wide = torch.stack([x.double() for x in expected])
    exact = not leaf.is_floating_point()
    limit = 0.0 if exact else tolerance
    torch.testing.assert_close(leaf.double(), wide, rtol=limit, atol=limit, msg=lambda m: f"{name}: {m}")


def derivatives(outs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss that weights each element of each example differently."""
    g = torch.Generator().manual_seed(1)
    loss = sum([(x * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in outs], torch.zeros(()))
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, leaves, strict=True)]
