"""Runs a random program on a batch and, as a loop, on its examples, and compares values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from autobatch.generate import SIZE, Program
from torch import Tensor

from tdc.autobatch.decorator import BatchFunction, batch, lanes
from tdc.core import pytree
from tdc.testing.batched import Alone
from tdc.testing.examples import Examples, captured

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


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


def inputs(p: Program, grads: bool = True) -> Inputs:
    """The inputs of a program; `grads` says whether they take part in autograd."""
    g = torch.Generator().manual_seed(p.seed)
    dtype = torch.float64 if p.double else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grads)

    many = range(p.size)
    lengths = torch.randint(0, 5, (p.size,), generator=g).tolist() if p.rows != "static" else [SIZE] * p.size
    v = [draw(SIZE)] * p.size if p.style == "shared" else [draw(SIZE) for _ in many]
    n = [torch.randint(0, 5, (), generator=g) for _ in many]
    xs, ys = [draw(t, SIZE) for t in lengths], [draw(t) for t in lengths]
    return Inputs([draw() for _ in many], v, n, xs, ys, draw(SIZE), draw())


def functions(p: Program, given: Inputs, **options: Any) -> BatchFunction:
    """The function of a program, with its helper; options are those of `batch`."""
    helper = made(p.helper, given, None)
    return made(p.text, given, helper, **options)


def made(text: str, given: Inputs, other: Any, **options: Any) -> BatchFunction:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(text, "<random program>", "exec"), scope)
    return batch(scope["make"](given.w, given.c, True, other), source=text, **options)


def batched(f: BatchFunction, p: Program, args: Any, compiler: Compiler | None) -> Any:
    """The result of the batch."""
    if p.style == "lanes":
        return f(*[lanes(x) if isinstance(x, Tensor) else x for x in args])
    run = f.map if compiler is None else compiler(f.map)
    return run(*args, in_dims=DIMS.get(p.style, 0))


DIMS = {"shared": (0, None, 0, 0, 0), "moved": (0, 1, 0, 0, 0)}
NAMES = ("x", "v", "n", "xs", "ys")


class NotANumber(AssertionError):
    """A program that compares nothing: examples give NaN by themselves."""


def check(p: Program, compiler: Compiler | None = None, grads: bool = True, **options: Any) -> int:
    """Compare the batch with the loop. Returns how many gradients were not zero.

    Args:
        grads: whether gradients are compared; if not, autograd is off for the batch.

    Raises:
        AssertionError: a value or a gradient differs.
        NotANumber: there is none to compare.
    """
    given = inputs(p, grads)
    f = functions(p, given, **options)
    rows = [*zip(given.x, given.v, given.n, given.xs, given.ys, strict=True)]
    examples = Examples(rows, DIMS.get(p.style, 0), NAMES, grads, ragged=() if p.rows == "static" else NAMES[3:])
    tolerance = 1e-9 if p.double else 1e-5
    alone = Alone(f.fn, examples, captured("", f), tolerance, tolerance)
    for one in alone.ones:
        found = [x for x in pytree.tree_leaves(one.result) if isinstance(x, Tensor)]
        if any([x.isnan().any() for x in found]):
            raise NotANumber("an example alone gives NaN")

    def run(*args: Any) -> Any:
        with torch.set_grad_enabled(grads):
            return batched(f, p, args, compiler)

    wrong = alone.differences(run, range(p.size), p.rows == "padded")
    assert not wrong, "\n".join(wrong)
    return sum([bool(g.abs().sum() > 0) for one in alone.ones for g in (*one.own.values(), *one.common.values())])
