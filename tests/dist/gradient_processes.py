"""What one process of several does with gradients and graphs of collectives, and all of `dist_processes`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from dist_processes import CASES, run_cases
from dist_samples import texts
from torch import Tensor
from torch.testing import assert_close

import tdc
from tdc import NestedTensor, TensorDict
from tdc.core.dynamo import has_gradients_in_graphs

Sources = list[TensorDict]


def dense(rank: int, n: int) -> TensorDict:
    x = torch.linspace(0.1, 1 + rank, n * 3).reshape(n, 3)
    return TensorDict({"x": x, "in": {"y": torch.linspace(-1, 1, n).double() * (rank + 1)}, "id": torch.arange(n)}, [n])


def ragged(rank: int, n: int) -> TensorDict:
    text = texts(rank, n, 2)
    return TensorDict({"t": text.with_values(text.values * 0.1), "x": dense(rank, n)["x"]}, [n])


def alike(rank: int, n: int) -> TensorDict:
    """Of the same lengths on all ranks."""
    td = ragged(0, n)
    return td.apply(lambda x: x * (rank + 1))


def cut(td: TensorDict, rank: int, world: int) -> TensorDict:
    n = len(td) // world
    return td[rank * n : (rank + 1) * n]


def parts(td: TensorDict, world: int) -> list[TensorDict]:
    """One row for rank 0, two for rank 1, and so on."""
    ends = [r * (r + 1) // 2 for r in range(world + 1)]
    return [td[a:b] for a, b in pairwise(ends)]


def total(tds: Sources, weights: Any = None) -> TensorDict:
    found = tds[0] * (1 if weights is None else weights[0])
    for r, td in enumerate(tds[1:], 1):
        found = found + td * (1 if weights is None else weights[r])
    return found


def whole(td: TensorDict) -> TensorDict:
    return td.exclude("id") if "id" in td else td


# what each rank calls; the same of the structures of all ranks, for one of them; rows of a rank
Case = tuple[Callable[[TensorDict, int, int], Any], Callable[[Sources, int, int], Any], Callable[[int, int], int]]
CALLS: dict[str, Case] = {
    "all_gather": (
        lambda td, r, w: tdc.dist.all_gather(td),
        lambda tds, r, w: torch.cat(tds),
        lambda r, w: 2 + r,
    ),
    "all_gather even": (
        lambda td, r, w: tdc.dist.all_gather(td, even=True),
        lambda tds, r, w: torch.cat(tds),
        lambda r, w: 2,
    ),
    "stack": (
        lambda td, r, w: tdc.dist.all_gather(td, dim=None),
        lambda tds, r, w: torch.stack(tds),
        lambda r, w: 2,
    ),
    "sum": (
        lambda td, r, w: tdc.dist.all_reduce(whole(td)),
        lambda tds, r, w: total([whole(td) for td in tds]),
        lambda r, w: 2,
    ),
    "mean": (
        lambda td, r, w: tdc.dist.all_reduce(whole(td), "mean"),
        lambda tds, r, w: total([whole(td) for td in tds]) / w,
        lambda r, w: 2,
    ),
    "weighted mean": (
        lambda td, r, w: tdc.dist.all_reduce(whole(td), "mean", weight=torch.tensor(r + 1.0)),
        lambda tds, r, w: total([whole(td) for td in tds], range(1, w + 1)) / (w * (w + 1) / 2),
        lambda r, w: 2,
    ),
    "max": (
        lambda td, r, w: tdc.dist.all_reduce(whole(td), "max"),
        lambda tds, r, w: torch.stack([whole(td) for td in tds]).amax(0),
        lambda r, w: 2,
    ),
    "reduce_scatter": (
        lambda td, r, w: tdc.dist.reduce_scatter(whole(td)),
        lambda tds, r, w: cut(total([whole(td) for td in tds]), r, w),
        lambda r, w: 2 * w,
    ),
    "all_to_all": (
        lambda td, r, w: torch.cat(tdc.dist.all_to_all(parts(td, w))),
        lambda tds, r, w: torch.cat([parts(td, w)[r] for td in tds]),
        lambda r, w: w * (w + 1) // 2,
    ),
    "broadcast": (
        lambda td, r, w: tdc.dist.broadcast(td, w - 1),
        lambda tds, r, w: tds[w - 1],
        lambda r, w: 2,
    ),
}  # fmt: skip


def floats(x: Any) -> list[Tensor]:
    """The tensors of floating numbers in a structure."""
    leaves = x.values(True, True) if isinstance(x, TensorDict) else [x]
    found = [v.values if isinstance(v, NestedTensor) else v for v in leaves]
    return [v for v in found if v.is_floating_point()]


def loss_of(out: Any, rank: int) -> Tensor:
    """Another loss on each rank, to which no numbers contribute alike."""
    factors = [(rank + 1.5) * torch.arange(1.0, x.numel() + 1).reshape(x.shape) for x in floats(out)]
    return torch.stack([(x * f).sin().sum().double() for x, f in zip(floats(out), factors, strict=True)]).sum()


def leaf(td: Any) -> Any:
    """The same numbers, which require grad."""
    def fresh(x: Any) -> Any:
        if not x.is_floating_point():
            return x
        return x.detach().requires_grad_() if isinstance(x, Tensor) else x.with_values(fresh(x.values))

    return td.apply(fresh)


def expected(name: str, make: Any, rank: int, world: int) -> tuple[Any, list[Tensor]]:
    """The result and the gradients that one process computes with everything."""
    _, all_of, rows = CALLS[name]
    sources = [leaf(make(r, rows(r, world))) for r in range(world)]
    outs = [all_of(sources, r, world) for r in range(world)]
    losses = [loss_of(out, r) for r, out in enumerate(outs)]
    return outs[rank], list(torch.autograd.grad(sum(losses), floats(sources[rank]), allow_unused=True))  # type: ignore[arg-type]  # of a sum


def check(name: str, make: Any, rank: int, world: int, wrap: Any = lambda f: f) -> None:
    call, _, rows = CALLS[name]
    source = leaf(make(rank, rows(rank, world)))
    fn = wrap(lambda td: call(td, rank, world))
    out = fn(source)
    want, grads = expected(name, make, rank, world)
    tdc.testing.assert_close(out.apply(lambda x: x.detach()), want.apply(lambda x: x.detach()), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(loss_of(out, rank), floats(source), allow_unused=True)
    for a, b in zip(found, grads, strict=True):  # None where nothing comes from this rank
        zero = torch.zeros_like(next(x for x in (a, b, torch.zeros(())) if x is not None))
        assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-4, atol=1e-5)


def gradients_of_dense_structures(rank: int, world: int) -> None:
    for name in CALLS:
        check(name, dense, rank, world)


RAGGED = {"all_gather": ragged, "all_to_all": ragged, "broadcast": alike, "sum": alike, "weighted mean": alike}


def gradients_of_ragged_structures(rank: int, world: int) -> None:
    for name, make in RAGGED.items():
        check(name, make, rank, world)


def graphs_of_dense_structures(rank: int, world: int) -> None:
    for name in CALLS:
        torch._dynamo.reset()
        check(name, dense, rank, world, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))


def graphs_of_ragged_structures(rank: int, world: int) -> None:
    for name, make in RAGGED.items():
        torch._dynamo.reset()
        check(name, make, rank, world, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))


def transforms(rank: int, world: int) -> None:
    """`vmap`, `tdc.grad`, and one in the other, eagerly."""
    for name in CALLS:
        check_transforms(name, rank, world)


def scaled(td: Any, w: Tensor) -> Any:
    return td.apply(lambda x: x * w.to(x.dtype))


def check_transforms(name: str, rank: int, world: int) -> None:
    call, all_of, rows = CALLS[name]
    sources = [dense(r, rows(r, world)).exclude("id") for r in range(world)]
    weights = torch.arange(3.0)
    out = tdc.vmap(lambda w: call(scaled(sources[rank], w), rank, world), in_dims=0)(weights)
    for i, w in enumerate(weights):
        want = all_of([scaled(td, w) for td in sources], rank, world)
        tdc.testing.assert_close(out[i], want, rtol=1e-5, atol=1e-6)

    def alone(w: Tensor, r: int) -> Tensor:
        return loss_of(all_of([scaled(td, w) for td in sources], r, world), r)

    def ours(w: Tensor) -> Tensor:
        return loss_of(call(scaled(sources[rank], w), rank, world), rank)

    one = torch.tensor(1.5)  # on each rank, so the gradients of all ranks add up
    for found in (tdc.grad(ours)(one), torch.func.grad(ours)(one), tdc.vmap(tdc.grad(ours))(one[None])[0]):
        total = tdc.dist.all_reduce(found)
        assert_close(total, sum([torch.func.grad(alone)(one, r) for r in range(world)]), rtol=1e-4, atol=1e-4)


def contrastive(a: Tensor, b: Tensor, first: int) -> Tensor:
    """The loss of one rank: each of its rows is to find its partner among the rows of all."""
    others, counts = tdc.dist.all_gather(b, counts=True)
    labels = torch.arange(a.shape[0]) + counts[:first].sum()
    return torch.nn.functional.cross_entropy(a @ others.T, labels, reduction="sum") + others.square().mean()


def graphs_for_all_rows(rank: int, world: int) -> None:
    """Uneven rows, in Inductor; with gradients taken in the graph, too."""
    w = torch.linspace(-1, 1, 12).reshape(3, 4)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return contrastive(x @ w, torch.tanh(x @ w), rank)

    def alone(w: Tensor, xs: list[Tensor]) -> Tensor:
        a = torch.cat(xs) @ w
        b = torch.tanh(a)
        loss = torch.nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)), reduction="sum")
        return loss + len(xs) * b.square().mean()

    def behind(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = w.clone().requires_grad_()
        value = graph(leaf, x)
        value.backward()
        return value, leaf.grad  # type: ignore[return-value]  # there is one

    graph = torch.compile(loss, fullgraph=True)
    inside = torch.compile(tdc.value_and_grad(loss), fullgraph=True)
    for step in (behind, inside) if has_gradients_in_graphs() else (behind,):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for turn in range(4):
            xs = [torch.linspace(0, 1 + r, 3 * (4 + turn + 2 * r)).reshape(-1, 3) for r in range(world)]
            torch._dynamo.maybe_mark_dynamic(xs[rank], 0)
            value, grad = step(w, xs[rank])
            found = tdc.dist.all_reduce(TensorDict({"value": value.detach(), "grad": grad}))
            value, grad = tdc.value_and_grad(alone)(w, xs)
            tdc.testing.assert_close(found, TensorDict({"value": value, "grad": grad}), rtol=1e-4, atol=1e-4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


FAST = [gradients_of_dense_structures, gradients_of_ragged_structures, transforms]
GRAPHS = [graphs_of_dense_structures, graphs_of_ragged_structures, graphs_for_all_rows]

if __name__ == "__main__":
    run_cases(CASES + FAST, GRAPHS, sys.argv)
