"""A failed check of compiled code raises its error, and the process goes on, whatever the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import OLD

import tdc
from tdc.compile import counted, export
from tdc.core.asserts import require_op

PROGRAM = """
import sys
import torch, tdc

class Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.lin(torch.nn.functional.layer_norm(x, (64,)))[:, -1]

def batch(*lengths):
    return tdc.pack([torch.ones(n, 64) for n in lengths])

def made(way, net, path):
    if way == "counted":
        return tdc.compile.counted(net.requires_grad_(False))
    if way == "compile":
        return torch.compile(net.requires_grad_(False), fullgraph=True)
    if way == "train_step":
        step = tdc.compile.train_step(net, lambda net, x: net(x).square().mean(), tdc.optim.adamw(1e-3))
        state = step.init()
        return lambda x: step(state, x)
    program = tdc.compile.export(net, (batch(300, 300, 300),), dynamic={"x": {"batch": ("B", 0, 8)}})
    return tdc.compile.load(program.save(path, format="aoti"))

fn = made(sys.argv[1], Last(), sys.argv[2])
fn(batch(300, 300, 300))
try:
    fn(batch(300, 300, 0))
except RuntimeError as error:
    print(error)
fn(batch(300, 200))
print("alive")
"""


@pytest.mark.slow
@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("way", ["counted", "compile", "train_step", "aoti"])
def test_the_process_goes_on(way: str, threads: int, tmp_path: Path):
    if way == "aoti" and OLD:
        pytest.skip("torch 2.11 ends the process")
    command = [sys.executable, "-c", PROGRAM, way, str(tmp_path / "net.pt2")]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, alive = done.stdout.splitlines()
    assert text.startswith("tdc.index: expected rows with an element at -1, got a shorter row; hint: drop short rows")
    assert alive == "alive"


INDICES = """
import sys
import torch, tdc
import torch.nn.functional as F

def refused(fn, *args):
    try:
        fn(*args)
    except RuntimeError as error:
        return "tdc.index: expected an index from 0 to" in str(error) or str(error)
    return "no error"

table, weight = torch.nn.Embedding(50, 16).requires_grad_(False), torch.randn(70_000)
ids, places = torch.randint(50, (20_000,)), torch.randint(70_000, (50_000,))
fns = [
    (lambda i: table(i) * 2, ids), (lambda i: weight[i].sum(), places), (lambda i: weight.gather(0, i) + 1, places),
    (lambda i: weight[i.int()].exp(), places), (lambda i: torch.zeros(50).index_add(0, i, i.float()), ids),
    (lambda i: F.cross_entropy(table.weight[:, :10].repeat(400, 1), i % 10 + i // 50), ids),
    (lambda i: weight[:, None].expand(-1, 4)[i].sum(1), places),
]
for fn, given in fns:
    run = tdc.compile.counted(fn, fullgraph=True)
    torch.testing.assert_close(run(given), fn(given), rtol=1e-3, atol=1e-3)
    for wrong in (70_000, 10**12, -(10**12)):
        print(refused(run, given.clone().index_fill_(0, torch.tensor([0, 7, 19_999]), wrong)))
    torch.testing.assert_close(run(given), fn(given), rtol=1e-3, atol=1e-3)
"""


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("threads", [2, 8])
def test_an_index_out_of_range_ends_no_process(threads: int):
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", INDICES], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["True"] * 21 + [""]


def names(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes]


def test_a_graph_has_the_operator_and_an_exported_one_none():
    """The operator stays in the graph, though it has no result."""
    graphs: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    def last(x: Any) -> Tensor:
        return x[:, -1]

    x = tdc.pack([torch.ones(3, 2), torch.ones(2, 2)])
    torch.compile(last, backend=note, fullgraph=True)(x)
    assert names(graphs[0]).count("tdc.require.default") == 1
    program = export(last, (x,), dynamic={"x": {"batch": ("B", 0, 8)}}).program
    found = names(program.graph)
    assert "aten._assert_async.msg" in found
    assert not [name for name in found if name.startswith("tdc.")]


def test_the_condition_of_all_members_of_a_vmap():
    def positive(x: Tensor) -> Tensor:
        require_op((x > 0).all(), "positive numbers")
        return x * 2

    fn = counted(torch.vmap(positive), backend="aot_eager", fullgraph=True)
    for run in (torch.vmap(positive), fn):
        torch.testing.assert_close(run(torch.ones(3, 2)), torch.full((3, 2), 2.0))
        with pytest.raises(RuntimeError, match="positive numbers"):
            run(torch.tensor([[1.0], [-1.0]]))
