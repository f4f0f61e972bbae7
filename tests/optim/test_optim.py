"""Optimisers: the numbers of `torch.optim` step for step, one graph for all steps, ensembles, error texts."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import papers
import pytest
import torch
from texts import T
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.testing import assert_close

import tdc
from tdc import TensorDict
from tdc.compile import counted
from tdc.optim import (
    Optimizer,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    global_norm,
    lamb,
    lion,
    nadam,
    radam,
    rmsprop,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
)

STEPS = 50
SHAPES = {("layer", "weight"): (3, 4), ("layer", "bias"): (3,), "scale": ()}


Pair = tuple[Callable[..., Optimizer], type[torch.optim.Optimizer], dict[str, Any]]
PAIRS: dict[str, Pair] = {
    "sgd": (sgd, torch.optim.SGD, {"lr": 0.1}),
    "sgd_decay": (sgd, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_momentum": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_dampened": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3}),
    "sgd_nesterov": (sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (adam, torch.optim.Adam, {"lr": 0.01}),
    "adam_decay": (adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adam_no_mean": (adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.9)}),
    "adamw": (adamw, torch.optim.AdamW, {"lr": 0.01}),
    "adamw_decay": (adamw, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.3}),
    "adam_amsgrad": (adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.6), "amsgrad": True}),
    "adamw_amsgrad": (adamw, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.7), "amsgrad": True}),
    "adamax": (adamax, torch.optim.Adamax, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "nadam": (nadam, torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam_decoupled": (
        nadam,
        torch.optim.NAdam,
        {"lr": 0.01, "momentum_decay": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "radam": (radam, torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "radam_decoupled": (
        radam,
        torch.optim.RAdam,
        {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adagrad": (
        adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
    ),
    "rmsprop": (rmsprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9}),
    "rmsprop_centered": (
        rmsprop,
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.9, "eps": 0.1, "weight_decay": 0.1, "momentum": 0.9, "centered": True},
    ),
    "adadelta": (adadelta, torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    "adafactor": (adafactor, torch.optim.Adafactor, {"lr": 0.3, "weight_decay": 0.1}),
    "adafactor_small": (adafactor, torch.optim.Adafactor, {"lr": 0.01, "eps": (1e-3, 0.5), "beta2_decay": -0.5}),
    "lion": (lion, papers.Lion, {"lr": 0.01}),
    "lion_decay": (lion, papers.Lion, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.3}),
    "lamb": (lamb, papers.Lamb, {"lr": 0.01, "weight_decay": 0.1}),
    "schedule_free_sgd": (schedule_free_sgd, papers.ScheduleFreeSGD, {"lr": 0.1, "weight_decay": 0.1}),
    "schedule_free_adamw": (
        schedule_free_adamw,
        papers.ScheduleFreeAdamW,
        {"lr": 0.01, "weight_decay": 0.1, "warmup": 7},
    ),
}
ONE_EACH = [
    "sgd_dampened", "adam_decay", "adamw", "lion_decay", "adam_amsgrad", "nadam", "radam", "rmsprop_centered",
    "adafactor", "lamb", "schedule_free_adamw",
]  # fmt: skip
REAL_ONLY = {papers.Lion, papers.Lamb, papers.ScheduleFreeAdamW, torch.optim.Adafactor}
ROUGH = defaultdict(lambda: 1e-12, nadam=1e-6, nadam_decoupled=1e-6)  # torch keeps a product in float32


def like(dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = ()) -> TensorDict:
    return TensorDict({k: torch.randn((*batch, *s), dtype=dtype) for k, s in SHAPES.items()}, batch)


def reference(cls: type[torch.optim.Optimizer], settings: dict[str, Any], params: TensorDict) -> Any:
    """`step(grads, lr) -> parameters`, by an optimiser of torch on clones."""
    mine = params.apply(torch.clone)
    opt = cls(list(mine.values(True, True)), **settings)

    def step(grads: TensorDict, lr: float | None = None) -> TensorDict:
        for key, p in mine.items(True, True):
            p.grad = grads[key].clone() if key in grads else None
        for group in opt.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        opt.step()
        return mine

    return step


def runs(optimizer: Optimizer, params: TensorDict, update: Any = None, steps: int = STEPS) -> Iterator[Any]:
    """Gradients, then parameters and state after each step."""
    state, update = optimizer.init(params), update or optimizer.update
    for _ in range(steps):
        grads = params.apply(torch.randn_like)
        params, state = update(grads, state, params)
        yield grads, params, state


@pytest.mark.cases(40, 20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype):
    make, cls, settings = PAIRS[name]
    if cls in REAL_ONLY and dtype.is_complex:
        pytest.skip("the reference has no complex numbers")
    params = like(dtype)
    expected = reference(cls, settings, params)
    digits = ROUGH[name] if dtype == torch.float64 else 5e-6 if cls in papers.Written.__subclasses__() else 2e-6
    tight = {"rtol": digits, "atol": digits}
    for n, (grads, new, state) in enumerate(runs(make(**settings), params), 1):
        assert_close(new.to_dict(), expected(grads).to_dict(), **tight)
        for step in [x for key, x in state.items(True, True) if key[-1] == "step" or key == "step"]:
            assert (step.dtype, step.shape) == (torch.int64, ())
            assert step == n


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", PAIRS)
def test_bfloat16_parameters_have_float32_state(name: str):
    make, cls, settings = PAIRS[name]
    params = like(torch.bfloat16)
    expected = reference(cls, settings, params.float())  # a float32 step, then rounded to bfloat16 in place
    differ = 0
    for grads, new, state in runs(make(**settings), params):
        moments = [x for x in state.values(True, True) if x.is_floating_point()]
        assert all([x.dtype == torch.float32 for x in moments])
        wanted = expected(grads.float())
        for key, p in wanted.items(True, True):
            p.copy_(p.bfloat16())
            assert new[key].dtype == torch.bfloat16
            differ += int((new[key] != p.bfloat16()).sum())
        assert_close(new.to_dict(), wanted.bfloat16().to_dict(), rtol=1.6e-2, atol=1e-2)
    assert differ <= 0.05 * STEPS * 16  # numbers that stood on the edge between two bfloat16s


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", [n if n in ONE_EACH else pytest.param(n, marks=pytest.mark.slow) for n in PAIRS])
def test_one_graph_for_all_steps(name: str):
    make, cls, settings = PAIRS[name]
    rate = cosine(settings["lr"], steps=40, warmup=5, floor=1e-3)
    optimizer = chain(clip_by_global_norm(1.0), make(**settings | {"lr": rate}))
    params = like()
    compiled = counted(optimizer.update, backend="aot_eager")
    expected = reference(cls, settings, params)
    for n, (grads, new, _) in enumerate(runs(optimizer, params, compiled)):
        norm = math.sqrt(sum([float(g.square().sum()) for g in grads.values(True, True)]))
        clipped = grads * min(1.0, 1.0 / (norm + 1e-6))
        assert_close(new.to_dict(), expected(clipped, float(rate(T(n)))).to_dict(), rtol=1e-4, atol=1e-5)
    assert (compiled.counts.graphs, compiled.counts.breaks, compiled.counts.compiles) == (1, 0, 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["sgd", "adam", "lion"])
def test_a_graph_refuses_gradients_that_broadcast(name: str):
    params = TensorDict({"w": torch.randn(3, 4)}, [])
    optimizer = getattr(tdc.optim, name)(1e-2)
    update = torch.compile(optimizer.update, backend="eager", fullgraph=True)
    for size in ((4,), (1, 4), (3, 1)):
        with pytest.raises(Unsupported, match="expected gradients with the shapes of params, got 1 that differ"):
            update(TensorDict({"w": torch.ones(size)}, []), optimizer.init(params), params)


@pytest.mark.cases(8, 6)
@pytest.mark.parametrize("how", ["vmap", "stacked", pytest.param("compiled vmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ONE_EACH)
def test_ensembles_are_their_members(name: str, how: str):
    make, _, settings = PAIRS[name]
    optimizer = chain(clip_by_global_norm(1.0), make(**settings | {"lr": cosine(settings["lr"], 20, 3)}))
    members = like(batch=(3,))
    update = optimizer.update if how == "stacked" else torch.vmap(optimizer.update)
    update = counted(update, backend="aot_eager") if how == "compiled vmap" else update
    alone = [(members[i], optimizer.init(members[i])) for i in range(3)]
    for grads, new, state in runs(optimizer, members, update, 10):
        alone = [optimizer.update(grads[i], s, p) for i, (p, s) in enumerate(alone)]
        assert_close(new.to_dict(), torch.stack([p for p, _ in alone]).to_dict())
        assert_close(state.to_dict(), torch.stack([s for _, s in alone]).to_dict())
        assert state["1"].batch_size == (3,)
    if isinstance(update, counted):
        assert update.counts.compiles == 1


def test_a_rate_for_each_member():
    members, rates = like(batch=(2,)), T([0.1, 0.01])
    grads = like(batch=(2,))
    wanted = [sgd(r).update(grads[i], sgd().init(members[i]), members[i])[0] for i, r in enumerate([0.1, 0.01])]
    stacked = sgd(rates).update(grads, sgd().init(members), members)[0]
    mapped = torch.vmap(lambda r, g, s, p: sgd(r).update(g, s, p))(rates, grads, sgd().init(members), members)[0]
    for found in (stacked, mapped):
        assert_close(found.to_dict(), torch.stack(wanted).to_dict())


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_constant_schedule_is_the_number(name: str):
    make, _, settings = PAIRS[name]
    params = like()
    scheduled = make(**settings | {"lr": constant(settings["lr"])})
    state, mine = scheduled.init(params), params
    for grads, new, _ in runs(make(**settings), params, steps=5):
        mine, state = scheduled.update(grads, state, mine)
        assert_close(mine.to_dict(), new.to_dict())


@pytest.mark.parametrize("name", ONE_EACH)
def test_what_has_no_gradient_stays(name: str):
    make, _, settings = PAIRS[name]
    params = TensorDict({"w": torch.randn(3), "frozen": torch.randn(2), "bn": {"count": T(4), "mean": torch.ones(2)}})
    optimizer = chain(clip_by_global_norm(0.5), make(**settings))
    state = optimizer.init(params)
    assert not [key for key in state.keys(True, True) if key[-2:] == ("bn", "count")]
    grads = tdc.grad(lambda p: p["w"].square().sum())(params).select("w")
    new, after = optimizer.update(grads, state, params)
    assert not new["w"].equal(params["w"])
    for key in ["frozen", ("bn", "count"), ("bn", "mean")]:
        assert new[key] is params[key]
    kept = params.select("w")
    alone = optimizer.update(grads, optimizer.init(kept), kept)
    assert_close(new["w"], alone[0]["w"])
    assert new.keys(True, True) == params.keys(True, True)
    assert [x for key, x in after.items(True, True) if key[-1] == "step" and x != 1] == []


@pytest.mark.parametrize("name", PAIRS)
def test_inputs_do_not_change(name: str):
    make, _, settings = PAIRS[name]
    params, grads = like(), like()
    optimizer = chain(clip_by_global_norm(0.1), make(**settings))
    _, state = optimizer.update(grads, optimizer.init(params), params)
    before = [td.apply(torch.clone) for td in (grads, state, params)]
    optimizer.update(grads, state, params)
    for td, copy in zip((grads, state, params), before, strict=True):
        assert_close(td.to_dict(), copy.to_dict(), rtol=0, atol=0)


def test_a_state_is_a_checkpoint():
    optimizer, params = chain(clip_by_global_norm(1.0), adamw()), like()
    *_, (_, params, state) = runs(optimizer, params, steps=3)
    file = io.BytesIO()
    torch.save({"params": params, "state": state}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    grads = like()
    wanted, again = optimizer.update(grads, state, params), optimizer.update(grads, loaded["state"], loaded["params"])
    assert_close(again[0].to_dict(), wanted[0].to_dict(), rtol=0, atol=0)
    assert again[1]["1", "step"] == 4


@tdc.tensorclass
class Affine:
    weight: torch.Tensor
    bias: torch.Tensor
    calls: torch.Tensor


@pytest.mark.slow
def test_parameters_may_be_a_tensorclass():
    params = Affine(torch.ones(3), torch.zeros(()), T(2), batch_size=[])
    nested = TensorDict({"head": params, "scale": torch.ones(2)})
    for optimizer in (chain(clip_by_global_norm(1.0), adamw(0.1)), sgd(0.1, momentum=0.9), lion(0.1)):
        grads = tdc.grad(lambda p: (p["weight"].sum() + p["bias"]) * 2)(TensorDict(params.to_dict()))
        new, _ = optimizer.update(grads, optimizer.init(params), params)
        assert type(new) is Affine
        assert new.calls is params.calls
        assert (new.weight < 1).all()
        update = counted(optimizer.update, backend="aot_eager")
        again, _ = update(TensorDict({"head": grads}), optimizer.init(nested), nested)
        assert type(again["head"]) is Affine
        assert_close(again["head"].weight, new.weight)


def test_nothing_to_optimise():
    params = TensorDict({"count": T(3)})
    for optimizer in (chain(clip_by_global_norm(1.0), adamw()), sgd(), lion()):
        new, _ = optimizer.update(TensorDict({}), optimizer.init(params), params)
        assert new["count"] is params["count"]


@pytest.mark.parametrize("batch", [(), (0,), (2,)], ids=str)
@pytest.mark.parametrize("name", ["adafactor", "adamw", "lamb", "muon", "rmsprop", "schedule_free_adamw", "sgd"])
def test_leaves_without_elements(name: str, batch: tuple[int, ...]):
    params = TensorDict({f"{n} {m}": torch.ones(*batch, n, m) for n in (0, 3) for m in (0, 3)}, batch)
    for _, new, state in runs(getattr(tdc.optim, name)(0.1), params, steps=2):
        assert [x.shape for x in new.values()] == [x.shape for x in params.values()]
        assert all([x.isfinite().all() for x in state.values(True, True)])


def test_an_update_can_be_differentiated():
    params, grads = like(), like()

    def after(rate: torch.Tensor) -> torch.Tensor:
        new, _ = adamw(rate).update(grads, adamw().init(params), params)
        return global_norm(new)

    slope = torch.func.grad(after)(T(0.1))
    assert_close(slope, (after(T(0.101)) - after(T(0.099))) / 0.002, rtol=1e-3, atol=1e-3)


# -- norms, schedules, averages


def test_global_norm_is_that_of_torch():
    td = like().set("count", T(7))
    tensors = [x for x in td.values(True, True) if x.is_floating_point()]
    assert_close(global_norm(td), torch.nn.utils.get_total_norm(tensors))
    assert global_norm(td.bfloat16().set("count", T(7))).dtype == torch.float32
    stacked = like(batch=(2, 3))
    assert_close(global_norm(stacked)[1, 2], global_norm(stacked[1, 2]))
    assert_close(torch.vmap(torch.vmap(global_norm))(stacked), global_norm(stacked))
    assert global_norm(TensorDict({"n": T(3)})) == 0
    assert global_norm(TensorDict({"n": torch.zeros(0, 3)})) == 0


@pytest.mark.parametrize("bound", [0.1, 1.0, 100.0])
def test_clipping_is_that_of_torch(bound: float):
    grads = like()
    mine = [nn.Parameter(torch.zeros_like(x)) for x in grads.values(True, True)]
    for p, g in zip(mine, grads.values(True, True), strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(mine, bound)
    clip = clip_by_global_norm(bound)
    found, _ = clip.update(grads, clip.init(grads), grads)
    assert_close(list(found.values(True, True)), [p.grad for p in mine])


def test_warmup_is_a_line():
    curve = cosine(1.0, steps=14, warmup=4, floor=0.1)(torch.arange(15))
    assert_close(curve[:5], T([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert_close(curve[4:], cosine(1.0, steps=10, floor=0.1)(torch.arange(11)))
    assert_close(constant(0.2)(torch.arange(3)), torch.full((3,), 0.2))
    assert_close(cosine(0.3, 20, floor=0.01)(T([25, 1000])), T([0.01, 0.01]))
