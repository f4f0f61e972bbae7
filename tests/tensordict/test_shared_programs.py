"""Shared in gradients, files and graphs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_graphs import EDGES, WEIGHT, graph, rows, with_shared
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import Shared, TensorDict
from tdc.compile.counts import counted
from tdc.core.errors import StructureError


def same(a: TensorDict, b: TensorDict) -> None:
    tdc.testing.assert_close(a, with_shared(b))


# -- gradients


def used(td: TensorDict) -> Tensor:
    source, target = td["edges"]
    moved = td["x"].new_zeros(3, 4).index_add(0, target, td["x"][source] * td["sub", "w"])
    return (moved * moved).sum()


def test_gradients_are_those_of_the_tensors():
    x, w = rows()["x"].requires_grad_(), WEIGHT.clone().requires_grad_()
    want = torch.autograd.grad(used(TensorDict({"x": x, "sub": {"w": Shared(w)}, "edges": Shared(EDGES)}, [3])), (x, w))
    grads = tdc.grad(used)(graph())
    assert type(grads._leaves["sub", "w"]) is Shared
    assert "edges" not in grads
    assert grads[:2]["x"].shape == (2, 4)
    torch.testing.assert_close((grads["x"], grads["sub", "w"]), want)
    found = torch.func.grad(lambda td: used(with_shared(td, EDGES, td["sub", "w"])))(graph().exclude("edges", "id"))
    torch.testing.assert_close((found["x"], found["sub", "w"]), want)
    td = graph().exclude("id").apply(lambda x: x.clone().requires_grad_(x.is_floating_point()))
    assert td.requires_grad
    assert not td.detach().requires_grad
    found = tdc.autograd_grad(used(td), td, allow_unused=True)
    torch.testing.assert_close((found["x"], found["sub", "w"]), want)
    used(td).backward()
    torch.testing.assert_close((td.grad["x"], td.grad["sub", "w"]), want)
    tangent = tdc.jvp(used, (graph(),), (graph().to(torch.float32).exclude("id", "edges").apply(torch.ones_like),))
    torch.testing.assert_close(tangent[1], want[0].sum() + want[1].sum())


def test_a_shared_of_each_outer_example():
    def inner(w: Tensor) -> TensorDict:
        return tdc.vmap(lambda row: row * 2)(with_shared(rows(), weight=w))["sub", "w"]

    assert tdc.vmap(inner)(torch.stack([WEIGHT, WEIGHT + 1]))[1].tolist() == (WEIGHT + 1).tolist()
    mapped = pytree.tree_unflatten([None, 0, None, 0, 0], pytree.tree_structure(graph()))
    got = torch.func.vmap(lambda td: td["x"] * td["sub", "w"], in_dims=(mapped,))(graph())
    torch.testing.assert_close(got, rows()["x"] * WEIGHT)


def test_jacobians():
    def fn(td: TensorDict) -> TensorDict:
        return td.select("x", ("sub", "w")).set("x", td["x"] * td["sub", "w"])

    for jacobian in (tdc.jacrev, tdc.jacfwd):
        found = jacobian(fn)(graph())
        want = jacobian(lambda x, w: x * w, (0, 1))(graph()["x"], WEIGHT)
        torch.testing.assert_close((found["x", "x"], found["x", "sub", "w"]), want, check_stride=False)
        assert found["sub", "w", "sub", "w"].shape == (4, 4)
        assert found[:2]["x", "sub", "w"].shape == (3, 4, 4)


def test_gradients_of_examples():
    def loss(w: Tensor, row: TensorDict) -> Tensor:
        return (row["x"] * w).square().sum() + row["edges"].sum()

    got = tdc.vmap(tdc.grad(loss), (None, 0))(WEIGHT, graph())
    torch.testing.assert_close(got, torch.stack([tdc.grad(loss)(WEIGHT, row) for row in graph()]))
    with pytest.raises(StructureError, match="Shared results that all examples share"):  # whose gradients differ
        tdc.vmap(tdc.grad(lambda row: (row["x"] * row["sub", "w"]).sum()))(graph())


# -- files and other processes


def test_it_is_saved_and_loaded(tmp_path: Path):
    td = graph()
    tdc.io.save(td, tmp_path / "store")
    tdc.io.to_safetensors(td, tmp_path / "file")
    tdc.io.dcp_save(td, tmp_path / "dcp")
    torch.save(td, tmp_path / "torch")
    same(tdc.io.load(tmp_path / "store"), rows())
    same(tdc.io.load(tmp_path / "store", mode="r+"), rows())
    same(td.memmap(tmp_path / "map"), rows())
    same(tdc.io.from_safetensors(tmp_path / "file"), rows())
    same(tdc.io.dcp_load(tmp_path / "dcp", trusted=True), rows())
    same(torch.load(tmp_path / "torch", weights_only=True), rows())
    same(pickle.loads(pickle.dumps(tdc.io.load(tmp_path / "store"))), rows())
    assert torch.equal(tdc.io.load(tmp_path / "store", "edges"), EDGES)
    assert tdc.io.load(tmp_path / "store", ["edges"])[:2]["edges"].shape == EDGES.shape
    same(tdc.data.Dataset(tmp_path / "store").__getitems__([0, 1, 2]), rows())
    with tdc.io.writer(tmp_path / "data", rows=2) as writer:
        writer.append(td)
        writer.append(td)
    same(tdc.data.Dataset(tmp_path / "data").__getitems__([0, 1, 2]), rows())
    buffer = io.BytesIO()
    torch.save({"state": td}, buffer)
    buffer.seek(0)
    same(torch.load(buffer)["state"], rows())


# -- classes and graphs


@tdc.tensorclass
class Graph:
    x: Tensor
    edges: Tensor


def test_a_field_of_a_tensorclass():
    g = Graph(torch.ones(3, 4), Shared(EDGES), batch_size=[3])
    assert type(g[1:]) is Graph
    assert g[1:].edges is EDGES
    assert (g * 2).edges is EDGES
    assert g.replace(edges=Shared(EDGES + 1))[0].edges.shape == (2, 3)


def moved(td: TensorDict) -> TensorDict:
    source, target = td["edges"]
    return td.set("x", td["x"].index_add(0, target, td["x"][source] * td["sub", "w"])) * 2


def test_one_graph_for_all_sizes():
    run = counted(moved, backend="eager")
    for n, edges in ((3, EDGES), (5, torch.cat([EDGES, EDGES], 1)), (7, EDGES[:, :2])):
        td = with_shared(rows(n), edges)
        got, want = run(td), moved(td)
        tdc.testing.assert_close(got, want)
        assert type(got._leaves["edges"]) is Shared
        assert got[:2]["edges"].shape == edges.shape
    assert run.counts.graphs <= 2
    assert run.counts.breaks == 0


def test_a_graph_takes_one_tensor():
    run = torch.compile(torch.add, backend="eager", fullgraph=True)
    same(run(graph(), graph()), rows() + rows())
    with pytest.raises(Exception, match="one Shared tensor for all"):
        run(graph(), with_shared(rows(), EDGES.clone()))


@tdc.batch
def chosen(row: TensorDict) -> Any:
    if row["id"] > 1:
        row = row.set("x", row["x"] * row["sub", "w"])
    return row


IN_GRAPHS: dict[str, Callable[[TensorDict], Any]] = {
    "vmap": lambda td: tdc.vmap(lambda row: row.set("z", row["x"] * row["sub", "w"]))(td),
    "batch": chosen,
    "grad": tdc.grad(used),
    "moved": lambda td: torch.cat([td, td * 2]).unsqueeze(1)[td["id"][1:]],
    "at": lambda td: td.at[0].set(td[1]).sum(0),
    "made": lambda td: td.set("twice", Shared(td["edges"] * 2))[1:],
    "tree_map": lambda td: pytree.tree_map(lambda x: x * 2, td),
}


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_graphs_give_what_eager_calls_give(name: str):
    fn = IN_GRAPHS[name]
    run = counted(lambda td: fn(td), backend="eager")
    for n in (4, 5, 7):
        td = graph(n)
        tdc.testing.assert_close(run(td), fn(td))
    assert run.counts.graphs == 1
    assert run.counts.breaks == 0
    assert run.counts.compiles <= 2


class Model(torch.nn.Module):
    def forward(self, td: TensorDict) -> TensorDict:
        return td.set("x", td["x"] * td["sub", "w"] + td["edges"].sum())


def test_an_exported_model_takes_batches_of_other_sizes(tmp_path: Path):
    exported = tdc.compile.export(Model(), (graph(4),))
    tdc.testing.assert_close(exported(graph(6)), Model()(graph(6)))
    with pytest.raises(StructureError, match=r"td.edges: Tensor int64\[2, 6\] instead of Tensor int64\[2, 3\]"):
        exported(with_shared(rows(6), torch.cat([EDGES, EDGES], 1)))
    with pytest.raises(StructureError, match="another structure"):
        exported(graph(4).set(("sub", "w"), torch.ones(4)))


@pytest.mark.slow  # two steps are compiled
def test_a_training_step_takes_it_beside_rows():
    net = torch.nn.Linear(4, 1)

    def loss(model: Any, td: TensorDict) -> Tensor:
        return model(td["x"] * td["sub", "w"]).square().mean()

    found = []
    for accumulate in (1, 2):
        step = tdc.compile.train_step(net, loss, tdc.optim.sgd(0.1), accumulate=accumulate, backend="eager")
        state = step.init(seed=0)
        for n in (4, 6):
            state, _ = step(state, graph(n))
        found.append(state["params"])
    tdc.testing.assert_close(found[1], found[0])
