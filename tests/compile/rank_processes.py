"""Cases of training steps that several processes run; `test_ranks` runs many of them in one start."""

from __future__ import annotations

import copy
import re
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inductor_code import code_of
from processes import leave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

import tdc
from tdc import DistError, DtypeError, ShapeError, StructureError, TdcError, TensorDict
from tdc.compile import ranks, shards, train_step
from tdc.optim import adamw, chain, clip_by_global_norm, ema, global_norm, masked, muon, sgd, sharded

LENGTHS = [3, 1, 2, 5, 2, 4, 6]
OPTIMIZER_ONLY = adamw(0.05)
OPTIMIZER = chain(clip_by_global_norm(0.1), adamw(0.05))
OPS: Any = torch.ops._c10d_functional


def group() -> Any:
    return dist.group.WORLD


class SumOfRanks(torch.autograd.Function):
    """The sum over ranks of a tensor; a gradient is that of the sum of all ranks' losses."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return OPS.wait_tensor(OPS.all_reduce(x.contiguous(), "sum", group().group_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return SumOfRanks.apply(*grads)


def alone(x: Tensor) -> Tensor:
    return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def whole(lengths: list[int] = LENGTHS) -> TensorDict:
    """The batch of all ranks."""
    torch.manual_seed(0)
    rows = tdc.pack([torch.randn(n, 4) for n in lengths])
    return TensorDict({"x": rows, "label": torch.arange(len(lengths)) % 4}, [len(lengths)])


def part(td: TensorDict, rank: int) -> TensorDict:
    """The part of a rank: other numbers of rows and tokens for each."""
    first, world = 2, dist.get_world_size()
    return td[:first] if rank == 0 else td[first + rank - 1 :: world - 1]


def to_center(whole_sum: Any) -> Any:
    """Distances to the mean of all ranks' rows: a mean over rows, with a collective in it."""

    def loss(net: nn.Module, batch: TensorDict) -> Any:
        out = net(batch["x"]).sum(1)
        total, rows = whole_sum(out.sum(0)), whole_sum(torch.ones(()) * out.shape[0])
        return ((out - total / rows).square() + out.square()).sum(1).mean()

    return loss


def to_center_of_tokens(whole_sum: Any) -> Any:
    """The same of tokens, as a sum and a count."""

    def loss(net: nn.Module, batch: TensorDict) -> Any:
        out = net(batch["x"]).values
        total, count = whole_sum(out.sum(0)), whole_sum(torch.ones(()) * out.shape[0])
        return ((out - total / count).square() + out.square()).sum(), batch["x"].lengths.sum()

    return loss


def small(loss: Any) -> Any:
    """A loss whose gradients, scaled, just fit into float16."""

    def scaled(net: nn.Module, batch: TensorDict) -> Any:
        out = loss(net, batch)
        return (out[0].float() * 0.01, out[1]) if isinstance(out, tuple) else out.float() * 0.01

    return scaled


def params_of(step: Any, state: TensorDict) -> TensorDict:
    """Whole parameters of a state that may have them in parts."""
    loaded = step.load_into(copy.deepcopy(step._step.loss.net), state)
    return TensorDict({tuple(name.split(".")): p.detach() for name, p in loaded.named_parameters()})


def both(rank: int, ours: Any, one: Any, steps: int = 3, batch: Any = None, **how: Any) -> tuple[Any, Any]:
    """States after steps of several ranks on their parts, and of one process on the whole batch."""
    here = {"compile": False, **how}
    batch = whole() if batch is None else batch
    names = ("loss", "grad_norm", *["scale"] * (how.get("dtype") is torch.float16))
    alike = {k: v for k, v in how.items() if k in ("dtype", "accumulate", "skip_nonfinite", "average")}
    step = train_step(net(), ours, OPTIMIZER, process_group=dist.group.WORLD, metrics=names, **here)
    single = train_step(net(), one, OPTIMIZER, compile=False, metrics=names, **alike)
    state, expected = step.init(), single.init()
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-3} if "dtype" in how else {"rtol": 1e-5, "atol": 1e-6}
    for _ in range(steps):
        (state, metrics), (expected, wanted) = step(state, part(batch, rank)), single(expected, batch)
        for name, value in wanted.items():
            assert_close(metrics[name].float(), value.float(), **close, msg=lambda text, name=name: f"{name}: {text}")
    for path, x in expected["params"].items(True, True):
        assert_close(params_of(step, state)[path], x, **close, msg=lambda text, path=path: f"{path}: {text}")
    if here["compile"]:
        assert (step.counts.graphs, step.counts.breaks) == (1, 0)
    if here.get("dtype") is torch.float16:
        assert state["skipped"] == expected["skipped"] == 0
    return state, expected


def collectives_in_losses(rank: int) -> None:
    """The gradient is that of the loss of the whole batch, where ranks weigh differently."""
    for make in (to_center, to_center_of_tokens):
        both(rank, make(SumOfRanks.apply), make(alone))


def collectives_in_losses_in_parts(rank: int) -> None:
    """Of micro-batches each is one of all ranks."""
    batch = whole()[:4] if dist.get_world_size() == 2 else whole()[:6]
    for make in (to_center, to_center_of_tokens):
        step = train_step(
            net(), make(SumOfRanks.apply), OPTIMIZER, process_group=dist.group.WORLD, accumulate=2, compile=False
        )
        state, metrics = step(step.init(), part(batch, rank))
        assert metrics["loss"].isfinite()
        assert state["step"] == 1


def collectives_in_losses_in_float16(rank: int) -> None:
    """A scaled loss is that of the whole batch, and overflows no sooner: 65504 is the largest number of float16."""
    for make in (to_center, to_center_of_tokens):
        both(rank, small(make(SumOfRanks.apply)), small(make(alone)), dtype=torch.float16)


def collectives_in_graphs(rank: int) -> None:
    """One graph."""
    for make in (to_center, to_center_of_tokens):
        both(rank, make(SumOfRanks.apply), make(alone), compile=True, backend="aot_eager")


def empty_ranks(rank: int) -> None:
    """A rank without examples adds nothing: not to a mean, not to a sum with a count, not in parts."""
    td = whole()[:2]  # all of it on rank 0
    assert len(part(td, 1)) == 0
    for loss in (cross_entropy, by_tokens):
        both(rank, loss, loss, batch=td)
        both(rank, loss, loss, batch=td, accumulate=2)
        both(rank, loss, loss, batch=td, skip_nonfinite=True)


def evaluation_of_all(rank: int) -> None:
    """Evaluation is of the batches of all ranks; a function that returns a dict is of this rank."""
    for loss in (cross_entropy, by_tokens):
        for td in (whole(), whole()[:2]):
            names: Any = ("loss", "rows", "tokens")
            step = train_step(net(), loss, OPTIMIZER, process_group=group(), compile=False)
            single = train_step(net(), loss, OPTIMIZER, compile=False)
            found = step.eval(metrics=names)(step.init(), part(td, rank))
            for name, value in single.eval(metrics=names)(single.init(), td).items():
                assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    evaluate = step.eval(lambda net, td: {"scores": net(td["x"]).values}, metrics=("rows",))
    assert evaluate(step.init(), part(whole(), rank))["rows"] == len(part(whole(), rank))


def dtypes_that_travel(rank: int) -> None:
    """One parameter in float64 travels so alone; 1,200 leaves are broadcast in four messages at most."""
    sent: list[tuple[str, torch.dtype, int]] = []

    def noted(name: str, fn: Any) -> Any:
        def run(x: Tensor, *args: Any, **how: Any) -> Any:
            sent.append((name, x.dtype, x.numel()))
            return fn(x, *args, **how)

        return run

    with (
        mock.patch.object(ranks, "started", noted("all_reduce", ranks.started)),
        mock.patch.object(dist, "broadcast", noted("broadcast", dist.broadcast)),
    ):
        params = {f"w{i}": torch.randn(3) for i in range(400)} | {"s": torch.randn(2, dtype=torch.float64)}
        step = train_step(lambda p, x: (p["w3"].sum() * p["s"].sum() * x.sum()).float(), adamw(), process_group=group(),
                          compile=False)
        state = step.init(TensorDict(params))
        assert [name for name, *_ in sent] == ["broadcast"] * 2
        sent.clear()
        step(state, torch.ones(rank + 1, 2))
        kinds = sorted([(str(dtype), n) for _, dtype, n in sent])
        assert kinds == [("torch.float32", 1202), ("torch.float64", 2)], kinds  # the loss and the weight, too


SHARDED: list[dict[str, Any]] = [{}, {"shard": "optimizer"}, {"shard": "params"}]
WAYS: list[dict[str, Any]] = [
    {}, {"accumulate": 2}, {"skip_nonfinite": True}, {"dtype": torch.float16}, {"average": ema(0.9)}, {"donate": True},
]  # fmt: skip


def parts_of_the_optimizer(rank: int) -> None:
    """Each rank updates its part of each bucket; the step is that of one process, with the norm of all."""
    world = dist.get_world_size()
    for loss in (cross_entropy, by_tokens):
        for how in WAYS:
            ours = small(loss) if "dtype" in how else loss
            state, expected = both(rank, ours, ours, shard="optimizer", bucket=100, **how)
            names = {path[-1] for path in state["optimizer"]._leaves if path[-2:-1] == ("mean",)}
            assert names == {"float32", "float32_1", "float32_2", "float32_3"}
            moments = state["optimizer", "1", "mean"]._leaves.values()
            assert sum([x.numel() for x in moments]) == tdc.param_count(expected["params"])
            assert [x.to_local().numel() for x in moments] == [part_size(x.numel(), rank, world) for x in moments]
    td = whole()[:2]  # the other ranks have nothing
    both(rank, cross_entropy, cross_entropy, batch=td, shard="optimizer")


def parts_of_the_parameters(rank: int) -> None:
    """Each rank keeps its part of all; the step is that of one process, and sends each gradient and parameter once."""
    world = dist.get_world_size()
    for loss in (cross_entropy, by_tokens):
        for how in WAYS:
            ours = small(loss) if "dtype" in how else loss
            state, expected = both(rank, ours, ours, shard="params", bucket=100, **how)
            n = tdc.param_count(expected["params"])
            assert sorted(state["params"].keys()) == ["float32", "float32_1", "float32_2", "float32_3"]
            kept = [x for name in ("params", "average") for x in state.get(name, TensorDict({})).values(True, True)]
            assert all([type(x).__name__ == "DTensor" for x in kept if x.ndim])
            vectors = [x for x in kept if x.ndim]
            assert sum([x.numel() for x in vectors]) == n * (1 + ("average" in how))
            assert [x.to_local().numel() for x in vectors] == [part_size(x.numel(), rank, world) for x in vectors]
    both(rank, cross_entropy, cross_entropy, batch=whole()[:2], shard="params")  # the other ranks have nothing
    how: Any = {"average": ema(0.5), "compile": False}
    step = train_step(net(), by_tokens, OPTIMIZER, process_group=group(), shard="params", **how)
    single = train_step(net(), by_tokens, OPTIMIZER, **how)
    (state, _), (expected, _) = step(step.init(), part(whole(), rank)), single(single.init(), whole())
    for averaged in (False, True):
        found, wanted = [s.eval(averaged=averaged) for s in (step, single)]
        assert_close(found(state, part(whole(), rank))["loss"], wanted(expected, whole())["loss"])
    with pytest.raises(StructureError, match="expected parameters in the parts that init makes, got others"):
        step(state.update({"params": expected["params"]}), part(whole(), rank))
    with pytest.raises(StructureError, match="expected floating-point parameters for shard='params', got 1 others"):
        train_step(lambda p, x: p["w"].sum(), adamw(), process_group=group(), shard="params").init(
            TensorDict({"w": torch.ones(3), "n": torch.tensor(1)})
        )


def bytes_of_parts(rank: int) -> None:
    """Of n bytes of parameters a step sends n(W-1)/W as gradients and as much as parameters; a rank keeps 1/W."""
    torch.manual_seed(0)
    world, sent = dist.get_world_size(), []
    wide = nn.Sequential(nn.Linear(50, 300), nn.Linear(300, 40))
    step = train_step(wide, lambda net, x: net(x).square().mean(), adamw(), process_group=group(), shard="params",
                      compile=False)
    state, n = step.init(), sum([p.numel() for p in wide.parameters()])
    kept = sum([(x.to_local() if hasattr(x, "to_local") else x).numel() for x in state.values(True, True)])
    assert kept <= 3 * n / world * 1.01

    def noted(fn: Any, of: int) -> Any:
        def run(out: Any, x: Tensor, **how: Any) -> Any:
            sent.append(x.numel() * of // world if of == 1 else x.numel())
            return fn(out, x, **how)

        return run

    with (
        mock.patch.object(shards, "SCATTER", noted(shards.SCATTER, 1)),
        mock.patch.object(dist, "all_gather", noted(dist.all_gather, world)),
    ):
        step(state, torch.randn(6, 50))
    assert len(sent) == 2
    assert sum(sent) <= 2 * n / world * 1.01  # to each other rank


def part_size(n: int, rank: int, world: int) -> int:
    size = -(-n // world)
    return max(0, min(size, n - rank * size))


class Kinds(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * (self.turn.abs().sum() * self.scale).float()


def dtypes_of_parts_and_messages(rank: int) -> None:
    """Vectors of each dtype; gradients that travel as bfloat16 are near; other settings are refused."""
    ways: list[dict[str, Any]] = [
        {"shard": "optimizer"}, {"shard": "optimizer", "bucket": 1}, {"bucket": 1}, {"shard": "params", "bucket": 1},
    ]  # fmt: skip
    for how in ways:
        torch.manual_seed(0)
        kinds = Kinds()
        step = train_step(kinds, cross_entropy, OPTIMIZER, process_group=group(), compile=False, **how)
        single = train_step(kinds, cross_entropy, OPTIMIZER, compile=False)
        state, expected = step.init(), single.init()
        for _ in range(3):
            state, expected = step(state, part(whole(), rank))[0], single(expected, whole())[0]
        for path, x in expected["params"].items(True, True):
            assert_close(params_of(step, state)[path], x, rtol=1e-5, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float64):
        for shard in (None, "optimizer", "params"):
            how = {"shard": shard, "reduce_dtype": dtype, "process_group": group()}
            step = train_step(net(), cross_entropy, sgd(0.1), compile=False, **how)
            single = train_step(net(), cross_entropy, sgd(0.1), compile=False)
            state, expected = step(step.init(), part(whole(), rank))[0], single(single.init(), whole())[0]
            near = 2e-2 if dtype is torch.bfloat16 else 1e-6
            found = params_of(step, state)
            for path, x in expected["params"].items(True, True):
                assert_close(found[path], x, rtol=near, atol=near / 10)
                other = found[path].clone()
                dist.broadcast(other, 0)
                assert torch.equal(other, found[path])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"shard": "all"}, r"expected shard='optimizer', 'params' or None, got 'all'"),
        ({"reduce_dtype": torch.int64}, "expected a floating-point reduce_dtype, got torch.int64"),
        ({"bucket": 0}, "expected bucket of at least 1 byte, got 0"),
        ({"shard": "optimizer", "process_group": None}, "expected process_group= beside shard=, got none"),
    ]
    for how, words in refused:
        with pytest.raises(TdcError, match=words):
            train_step(net(), cross_entropy, OPTIMIZER, **{"process_group": group(), **how})
    for other in (muon(), sharded(adamw(), group()), masked(adamw(), "*.bias"), SimpleNamespace(init=0, update=0)):
        with pytest.raises((StructureError, DtypeError)):
            train_step(net(), cross_entropy, other, process_group=group(), shard="optimizer")


def parts_in_graphs(rank: int) -> None:
    """One graph, with buckets, with and without parts, in memory that is handed on."""
    for how in SHARDED:
        both(rank, by_tokens, by_tokens, bucket=100, compile=True, backend="aot_eager", donate=True, **how)
    for shard in ("optimizer", "params"):
        both(rank, cross_entropy, cross_entropy, shard=shard, compile=True, backend="aot_eager", accumulate=2)
    names: Any = ("loss", "rows", "tokens")
    single = train_step(net(), by_tokens, OPTIMIZER, compile=False)
    wanted = single.eval(metrics=names)(single.init(), whole())
    for shard in ("optimizer", "params"):
        step = train_step(net(), by_tokens, OPTIMIZER, process_group=group(), shard=shard, backend="aot_eager")
        evaluate = step.eval(metrics=names)
        found = evaluate(step.init(), part(whole(), rank))
        for name, value in wanted.items():
            assert_close(found[name], value)
        assert (evaluate.counts.graphs, evaluate.counts.breaks) == (1, 0)


def buckets_go_while_the_backward_does(rank: int) -> None:
    """In the code of Inductor exchanges of gradients begin before the last product of the backward pass."""
    torch.manual_seed(0)
    deep = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    x = torch.randn(16, 32)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    ways: list[tuple[dict[str, Any], str]] = [
        ({}, "all_reduce"), ({"shard": "optimizer"}, "reduce_scatter"), ({"shard": "params"}, "reduce_scatter"),
    ]  # fmt: skip
    for how, call in ways:
        one = train_step(deep, loss, adamw(), compile=False)
        expected = one(one.init(), x)[0]
        for bucket, early in ((8000, True), (25 << 20, False)):
            step = train_step(deep, loss, adamw(), process_group=group(), bucket=bucket, **how)
            (state, _), code = code_of(step, step.init(), x[rank :: dist.get_world_size()])
            body = code[code.rindex("def call(") :]
            sent = [m.start() for m in re.finditer(rf"c10d_functional\.{call}", body)]
            products = [m.start() for m in re.finditer(r"extern_kernels\.(mm|addmm)|cpp_fused_\w*mm", body)]
            first_wait = body.index("c10d_functional.wait_tensor", sent[0])
            assert (sent[0] < products[-1]) is early, (how, bucket)
            assert first_wait > products[-1], (how, bucket)
            assert len(sent) >= (3 if early else 1)
            for path, p in expected["params"].items(True, True):
                assert_close(params_of(step, state)[path], p, rtol=1e-5, atol=1e-6)


def errors_of_one_rank(rank: int) -> None:
    """The others learn which rank failed and why, in seconds. Last: the group is of no use any more."""

    def loss(net: nn.Module, td: TensorDict) -> Tensor:
        if td["x"].values.shape[0] < 5:
            raise ValueError("too few tokens")
        return cross_entropy(net, td)

    step = train_step(net(), loss, OPTIMIZER, process_group=group(), compile=False)
    state = step.init()
    for _ in range(2):  # where all of them raise, the group can be used
        with pytest.raises(ValueError, match="too few"):
            step(state, whole()[:1])
    step(state, whole())
    begin, one = time.monotonic(), rank == 1
    words = "too few tokens" if one else "at rank 1: too few tokens"
    with pytest.raises(ValueError if one else DistError, match=words):
        step(state, whole()[:1] if one else whole())
    assert time.monotonic() - begin < 30  # of 120


def leaves_spread_over_ranks(rank: int) -> None:
    """DTensors of sizes that ranks do not divide: plain indices, masks, operands, norms; bytes of this process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = TensorDict({"w": torch.arange(21.0).reshape(7, 3)}, [7])
    mask, vector = torch.arange(7) % 3 != 1, torch.tensor([6, 0, 3])
    for dim in (0, 1):
        td = full.apply(lambda x, dim=dim: distribute_tensor(x, mesh, [Shard(dim)]))
        for idx in (vector, mask, [1, -1], (vector,), torch.tensor(2), 3, slice(1, 6, 2), None, (mask,)):
            assert torch.equal(td[idx]["w"].full_tensor(), full[idx]["w"]), (dim, idx)
        functions: list[Any] = [
            lambda x: torch.where(mask, x, x * 2), lambda x: torch.where(mask, x, 0), lambda x: x + torch.arange(7),
            lambda x: torch.where(torch.tensor(True), x, -x),
        ]  # fmt: skip
        for fn in functions:
            assert torch.equal(fn(td)["w"].full_tensor(), fn(full)["w"])
        assert tdc.nbytes(td) == 4 * td["w"].to_local().numel() < tdc.nbytes(full)
        plain, spread = TensorDict(full.to_dict()), TensorDict(td.to_dict())
        clip = clip_by_global_norm(1.0)
        found, wanted = [clip.update(x, clip.init(x), x)[0]["w"] for x in (spread, plain)]
        assert_close(found.full_tensor(), wanted)
        assert_close(global_norm(td), global_norm(full))
    step = train_step(net(), cross_entropy, sharded(OPTIMIZER_ONLY, mesh), process_group=mesh, compile=False)
    step(step.init(), part(whole(), rank))
    other = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ShapeError, match=r"expected a mesh of one dim, got one of 2\nhint: mesh\['a'\]"):
        train_step(net(), cross_entropy, OPTIMIZER, process_group=other)


def by_tokens(net: nn.Module, batch: TensorDict) -> Any:
    out = net(batch["x"])
    return out.square().sum((1, 2)).sum(), batch["x"].lengths.sum(), {"mean": out.values.mean()}


def cross_entropy(net: nn.Module, batch: TensorDict) -> Tensor:
    return F.cross_entropy(net(batch["x"]).sum(1), batch["label"])


if __name__ == "__main__":
    names, store, number, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=120), size, number)
    for name in names.split(","):
        globals()[name](number)
    leave(dead="errors_of_one_rank" in names)
