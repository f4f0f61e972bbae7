"""Loops between the same calls are one kernel on CPU; checks and memory stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inductor_code import code_of
from torch import Tensor
from versions import refused

import tdc
from tdc import TensorDict
from tdc.compile import backend, peak_bytes, train_step
from tdc.compile._torch import kernels as gathering
from tdc.optim import sgd

Function = Callable[..., Any]


def by(found: Any, fn: Function) -> Function:
    return torch.compile(fn, backend=found, fullgraph=True)


def kernels(fn: Function, *args: Any) -> tuple[int, int]:
    """How many kernels torch's Inductor writes for a function, and how many ours; results are compared."""
    counts = []
    for found in ("inductor", backend):
        torch._dynamo.reset()
        result, code = code_of(by(found, fn), *args)
        torch.testing.assert_close(result, fn(*args))
        counts.append(code.count("async_compile.cpp"))
    return counts[0], counts[1]


@pytest.mark.sweep
@pytest.mark.slow
def test_what_nobody_waits_for_joins_other_loops() -> None:
    """A sum of rows between two products, which neither reads."""

    def layers(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = x @ w
        bias = first.sum(0)
        second = first @ v
        return second.exp(), bias

    assert kernels(layers, torch.randn(7, 5), torch.randn(5, 5), torch.randn(5, 5)) == (2, 1)


@pytest.mark.sweep
@pytest.mark.slow
def test_what_reads_no_call_joins_the_loops_before_it() -> None:
    def lengths(x: Tensor, w: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        sizes = offsets[1:] - offsets[:-1]
        return (x.exp() @ w) @ w, torch.repeat_interleave(sizes, sizes, output_size=7) * 2

    x, w = torch.randn(70, 50, dtype=torch.float64), torch.randn(50, 50, dtype=torch.float64)
    found = kernels(lengths, x, w, torch.tensor([0, 3, 7]))
    assert found == (4, 2)


@pytest.mark.sweep
@pytest.mark.slow
def test_the_gradient_of_a_loop_has_fewer_kernels() -> None:
    """Each round makes products and copies them into rows."""

    def layer(h: Tensor, row: Any) -> tuple[Tensor, None]:
        return torch.tanh(h @ row["v"].exp() @ row["w"]), None

    def loss(params: TensorDict, x: Tensor) -> Tensor:
        return tdc.scan(layer, x, {"v": params["w"], "w": params["w"].tanh()}, dim=0)[0].square().mean()

    counts, losses = [], []
    with refused("tdc.scan: expected no transform of torch.func around it"):
        for found in ("inductor", backend):
            step = train_step(loss, sgd(0.1), backend=found)
            state = step.init(TensorDict({"w": torch.ones(3, 8, 8) / 4}))
            (_, metrics), code = code_of(step, state, torch.ones(9, 8))
            counts.append(code.count("async_compile.cpp"))
            losses.append(metrics["loss"])
        torch.testing.assert_close(losses[0], losses[1])
        assert counts[1] < counts[0]


@pytest.mark.sweep
@pytest.mark.slow
def test_no_memory_is_kept_for_it() -> None:
    """Loops that would hold a large product while the next one is made stay where they are."""
    n = 512

    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = (x @ x).sum(0)
        second = (first @ y)[:, None] * y
        return first, (second @ y).sum(0)

    x, y = torch.randn(n, n), torch.randn(n, n)
    for found in ("inductor", backend):
        torch._dynamo.reset()
        run = by(found, sums)
        run(x, y)
        assert peak_bytes(run, x, y) < 2.2 * n * n * 4


@torch.library.custom_op("tdc_tests::halve_", mutates_args={"s"})
def halve_(s: Tensor, x: Tensor) -> None:
    s.mul_(0.5)


@torch.library.custom_op("tdc_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    if not bool((x > 0).all()):
        raise ValueError("positive numbers")
    return x * 2


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tdc_tests::write_positive_", mutates_args={"t"})
def write_positive_(t: Tensor, x: Tensor) -> None:
    t.copy_(positive(x))


def asserted(x: Tensor) -> Tensor:
    torch.ops.aten._assert_async.msg((x > 0).all(), "positive numbers")
    return x * 2


def assert_then_call(s: Tensor, x: Tensor) -> Tensor:
    torch.ops.aten._assert_async.msg((x > 0).all(), "positive numbers")
    halve_(s, x)
    return (x @ x).exp()


def index_then_call(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[(x[0] < 0).long() * 9].exp()
    halve_(s, x)
    return (x @ x).exp(), row


def call_then_write(s: Tensor, x: Tensor) -> Tensor:
    y = x.exp() @ x
    found = positive(y.sin() + x)
    s.add_(y.sum())
    return found


def writing_call_then_write(s: Tensor, x: Tensor) -> Tensor:
    y = x.exp() @ x
    write_positive_(x, y.sin() + x)
    s.add_(y.sum())
    return y + 1


def loop_then_write(s: Tensor, x: Tensor) -> Tensor:
    y = x.exp() @ x
    begin = torch.zeros((), dtype=torch.int64), y.sin() + x
    found = tdc.while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, asserted(z)), begin)[1]
    s.add_(y.sum())
    return found


def branch_then_write(s: Tensor, x: Tensor) -> Tensor:
    y = x.exp() @ x
    found = torch.cond(x.sum() != 0, asserted, lambda z: z - 1, (y.sin() + x,))
    s.add_(y.sum())
    return found


def write_after_product(s: Tensor, x: Tensor) -> Tensor:
    found = x @ x.abs()
    torch.ops.aten._assert_async.msg((found > 0).all(), "positive numbers")
    s.copy_(s + 1)
    return (found @ x).exp()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "step",
    [
        assert_then_call, index_then_call, call_then_write, writing_call_then_write, loop_then_write,
        branch_then_write, write_after_product,
    ],
)  # fmt: skip
def test_what_comes_after_a_check_that_fails_writes_nothing(step: Function) -> None:
    run, x = by(backend, step), torch.full((3, 3), 3.0)
    states = [torch.ones(3), torch.ones(3)]
    torch.testing.assert_close(run(states[0], x.clone()), step(states[1], x.clone()))
    torch.testing.assert_close(*states)
    state = torch.ones(3)
    with pytest.raises((RuntimeError, ValueError), match=r"positive numbers|out of bounds"):
        run(state, -x)
    assert state.tolist() == [1.0] * 3


class Buffer:
    """What a node gives."""

    def __init__(self, name: str, size: int, writes: bool) -> None:
        self.name, self.writes = name, writes
        self.mpi_buffer = SimpleNamespace(size_alloc=size, size_free=size)

    def get_mutations(self) -> list[str]:
        return ["x"] if self.writes else []


class Node:
    """What the order of a graph is found by."""

    def __init__(
        self, name: str, *reads: str, call: bool = False, check: bool = False, writes: bool = False,
        device: str = "cpu", size: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.call, self.check, self.device = name, call, check or writes, torch.device(device)
        self.unmet_dependencies = [SimpleNamespace(name=read) for read in reads]
        self.node = None
        self.outputs, self.mpi_node = [Buffer(name, size, writes)], SimpleNamespace(pred_buffers=list[Buffer]())

    def get_buffer_names(self) -> set[str]:
        return {self.name}

    def get_nodes(self) -> list[Node]:
        return [self]

    def get_outputs(self) -> list[Buffer]:
        return self.outputs

    def get_device(self) -> torch.device:
        return self.device

    def is_extern(self) -> bool:
        return self.call

    def has_side_effects(self) -> bool:
        return self.check

    def is_template(self) -> bool:
        return False

    is_foreach = is_template


def call(name: str, *reads: str, **settings: Any) -> Node:
    return Node(name, *reads, call=True, **settings)


def order(nodes: list[Node], limit: float = float("inf")) -> str:
    """Names in the order found. While a node runs, its result and what it reads are in use, and nothing else."""
    by_name = {node.name: node.outputs[0] for node in nodes}
    for node in nodes:
        node.mpi_node.pred_buffers.extend([by_name[dep.name] for dep in node.unmet_dependencies])
    used = {
        node: sum([x.mpi_buffer.size_alloc for x in (*node.outputs, *node.mpi_node.pred_buffers)]) for node in nodes
    }
    return " ".join([node.name for node in gathering.gathered(list(nodes), gathering.Room(dict(used), limit))])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([Node("a"), call("m"), Node("b")], "m a b"),
        ([Node("a"), call("m", "a"), Node("b")], "a b m"),
        ([Node("a"), call("m", "a"), Node("b"), call("n", "b")], "a b m n"),
        ([Node("a"), call("m", "a"), Node("b", "m"), call("n", "a"), Node("c", "n")], "a m n b c"),
        ([Node("a"), call("m", "a"), Node("b", "m"), call("n", "b"), Node("c", "n")], "a m b n c"),
        ([Node("a"), call("m", "a", check=True), Node("b"), call("n", "b")], "a m b n"),
        ([Node("a"), call("m", "a", writes=True), Node("b"), call("n", "b")], "a b m n"),
        ([Node("a"), call("m", check=True), Node("b")], "m a b"),
        ([Node("a", check=True), call("m"), Node("b")], "m a b"),
        ([Node("a", check=True), call("m", writes=True), Node("b")], "a b m"),
        ([Node("a", check=True), call("m", writes=True), Node("b", "m")], "a m b"),
        ([Node("a"), call("m", "a"), Node("b", writes=True)], "a m b"),
        ([Node("a"), call("m"), Node("b"), call("n"), Node("c")], "m n a b c"),
        ([call("m"), Node("a", "m"), call("n")], "m a n"),
        ([Node("a", device="cuda"), call("m"), Node("b", device="cuda")], "a m b"),
        ([], ""),
    ],
)
def test_the_order_of_a_graph(nodes: list[Node], expected: str) -> None:
    assert order(nodes) == expected


def test_the_order_of_a_graph_with_a_limit_of_memory() -> None:
    """`b` would keep `m` while `n` runs, and `c` would be there while `m` runs."""

    def graph() -> list[Node]:
        first = [Node("a"), call("m", "a", size=10), Node("b", "m")]
        return [*first, call("n", "a", size=5), Node("c", size=3), call("o", "c")]

    assert order(graph()) == "a m n b c o"
    assert order(graph(), 15) == "a m b c n o"
    assert order(graph(), 11) == "a m b n c o"
