"""Transforms put together: chains, groups, averages, hyperparameters in the state, and what is around optimisers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import T
from torch import nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict, from_module
from tdc.compile import counted, train_step
from tdc.optim import (
    Optimizer,
    Transform,
    adamw,
    averaged,
    chain,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    cosine,
    decay,
    ema,
    inject,
    lookahead,
    masked,
    master_weights,
    multi_steps,
    noise,
    partition,
    schedule_free_adamw,
    sgd,
    skip_nonfinite,
)

SHAPES = {("body", "weight"): (3, 4), ("body", "bias"): (3,), ("norm", "weight"): (3,), ("head", "weight"): (2, 3)}
ALL: dict[str, Callable[[], Optimizer]] = {
    "chain": lambda: chain(clip_by_value(1.0), clip_by_norm(0.9), decay(0.1), adamw(0.1), ema(0.9)),
    "noise": lambda: chain(noise(0.1, seed=3), sgd(0.1, momentum=0.9)),
    "masked": lambda: masked(chain(masked(decay(0.1), "*.weight"), sgd(0.1)), lambda key, p: key[0] != "head"),
    "partition": lambda: partition({("norm.*", "*.bias"): adamw(0.1, weight_decay=0.0), "head.*": None, "*": adamw()}),
    "inject": lambda: inject(adamw, lr=0.1, weight_decay=0.1, eps=1e-6),
    "schedule": lambda: inject(sgd, lr=cosine(0.1, 20, 3), momentum=0.9),
    "lookahead": lambda: chain(sgd(0.1), lookahead(3)),
    "multi_steps": lambda: multi_steps(chain(clip_by_global_norm(1.0), adamw(0.1)), 3),
    "skip": lambda: skip_nonfinite(adamw(0.1, amsgrad=True)),
    "master": lambda: master_weights(chain(adamw(0.1), ema(0.9))),
    "all": lambda: skip_nonfinite(
        multi_steps(partition({"norm.*": sgd(0.1), "*": chain(inject(adamw, lr=0.1), lookahead(2))}), 2)
    ),
}


def like(batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> TensorDict:
    return TensorDict({k: torch.randn(*batch, *s, dtype=dtype) for k, s in SHAPES.items()}, batch)


def runs(opt: Any, params: TensorDict, grads: list[TensorDict], update: Any = None) -> tuple[TensorDict, TensorDict]:
    """Parameters and state after steps along these gradients."""
    state, update = opt.init(params), update or opt.update
    for g in grads:
        params, state = update(g, state, params)
    return params, state


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", ALL)
def test_one_graph_with_the_numbers_of_eager(name: str):
    opt, params, grads = ALL[name](), like(), [like() for _ in range(7)]
    compiled = counted(opt.update, backend="aot_eager")
    for a, b in zip(runs(opt, params, grads, compiled), runs(opt, params, grads), strict=True):
        assert_close(a.to_dict(), b.to_dict())
    assert (compiled.counts.graphs, compiled.counts.breaks, compiled.counts.compiles) == (1, 0, 1)


@pytest.mark.cases(9, 4)
@pytest.mark.parametrize("how", ["stacked", "vmap"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "noise"])
def test_ensembles_are_their_members(name: str, how: str):
    opt, params, grads = ALL[name](), like((2,)), [like((2,)) for _ in range(5)]
    grads[1] = grads[1].at[0].set(grads[1][0] * torch.inf) if name in ("skip", "all") else grads[1]
    new, state = runs(opt, params, grads, torch.vmap(opt.update) if how == "vmap" else None)
    for i in range(2):
        own, own_state = runs(opt, params[i], [g[i] for g in grads])
        assert_close(new[i].to_dict(), own.to_dict())
        assert_close(state[i].to_dict(), own_state.to_dict())


@pytest.mark.parametrize("name", ALL)
def test_inputs_do_not_change(name: str):
    opt, params, grads = ALL[name](), like(), like()
    _, state = runs(opt, params, [grads])
    before = [td.apply(torch.clone) for td in (grads, state, params)]
    opt.update(grads, state, params)
    for td, kept in zip((grads, state, params), before, strict=True):
        assert_close(td.to_dict(), kept.to_dict(), rtol=0, atol=0)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name", ["chain", *[pytest.param(n, marks=pytest.mark.slow) for n in ("partition", "lookahead", "master", "all")]]
)
def test_donated_steps_are_pure_steps(name: str):
    """States that hold parameters, as averages do, are written without changing one another."""
    params, x = like(), torch.randn(5, 4)

    def loss_fn(p: TensorDict, x: torch.Tensor) -> torch.Tensor:
        y = (x @ p["body", "weight"].mT + p["body", "bias"]) * p["norm", "weight"]
        return (y @ p["head", "weight"].mT).square().mean()

    steps = [train_step(loss_fn, ALL[name](), donate=d, backend="aot_eager") for d in (False, True)]
    states = [step.init(params) for step in steps]
    for _ in range(4):
        states = [step(state, x)[0] for step, state in zip(steps, states, strict=True)]
    assert_close(states[1].to_dict(), states[0].to_dict())
    assert steps[1].counts.compiles == 1


# -- groups


def test_groups_are_those_of_torch():
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    theirs = copy.deepcopy(net)
    plain = [p for name, p in theirs.named_parameters() if p.ndim == 1]
    rest = [p for name, p in theirs.named_parameters() if p.ndim > 1]
    reference = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0, "lr": 0.02}, {"params": rest}], 0.1)
    opt = partition({("*.bias", "1.*"): adamw(0.02, weight_decay=0.0), "*": adamw(0.1)})
    params, state = from_module(net), opt.init(from_module(net))
    for _ in range(50):
        grads = params.apply(torch.randn_like)
        for name, p in theirs.named_parameters():
            p.grad = grads[tuple(name.split("."))].clone()
        reference.step()
        params, state = opt.update(grads, state, params)
    assert_close(params.to_dict(), from_module(theirs).to_dict(), rtol=2e-6, atol=2e-6)
    assert state["0", "mean"].keys(True, True) == (("0", "bias"), ("1", "weight"), ("1", "bias"), ("2", "bias"))


def test_no_decay_of_some_leaves():
    params, grads = like(), like()
    opt = chain(masked(decay(0.1), "*.weight"), sgd(0.5))
    new, _ = runs(opt, params, [grads])
    for key, p in params.items(True, True):
        assert_close(new[key], p - 0.5 * (grads[key] + (0.1 * p if key[-1] == "weight" else 0)))


@pytest.mark.parametrize("select", ["head.*", ["head.weight"], lambda key, p: key[0] == "head"])
def test_frozen_leaves_are_the_same_objects(select: Any):
    params, grads = like().set("count", T(3)), like()
    for opt in (masked(adamw(0.1), select), partition({"head.*": adamw(0.1), "*": None})):
        new, state = runs(opt, params, [grads, grads.select("head"), grads.select("body")])
        assert not new["head", "weight"].equal(params["head", "weight"])
        for key, p in params.items(True, True):
            assert key == ("head", "weight") or new[key] is p
        assert [key for key in state.keys(True, True) if "body" in key] == []


def test_a_group_of_a_tensorclass():
    @tdc.tensorclass
    class Affine:
        weight: torch.Tensor
        bias: torch.Tensor

    params = Affine(torch.ones(3), torch.ones(3), batch_size=[])
    opt = partition({"weight": sgd(0.5), "bias": None})
    new, _ = opt.update(TensorDict({"weight": torch.ones(3)}), opt.init(params), params)
    assert type(new) is Affine
    assert new.bias is params.bias
    assert new.weight.tolist() == [0.5] * 3


# -- hyperparameters


def test_a_rate_in_the_state():
    """Changed between steps, and one for each model, with the numbers of an optimiser that was made with it."""
    params, grads, opt = like(), [like() for _ in range(3)], inject(adamw, lr=0.1, weight_decay=0.2)
    update, state, mine = counted(opt.update, backend="aot_eager"), opt.init(params), params
    want, inner = params, adamw().init(params)
    for g, rate in zip(grads, (0.1, 0.01, 0.0), strict=True):
        state = state.set(("hyper", "lr"), T(rate))
        mine, state = update(g, state, mine)
        want, inner = adamw(rate, weight_decay=0.2).update(g, inner, want)
        assert_close(mine.to_dict(), want.to_dict())
    assert update.counts.compiles == 1
    assert state["hyper", "weight_decay"] == T(0.2)


@pytest.mark.parametrize("make", [lambda **s: sgd(momentum=0.9, **s), lambda **s: chain(clip_by_value(0.5), sgd(**s))])
def test_all_that_an_optimiser_computes_with_may_be_in_the_state(make: Any):
    params, grads = like(), like()
    found = runs(inject(make, lr=0.1, weight_decay=0.3), params, [grads, grads])[0]
    assert_close(found.to_dict(), runs(make(lr=0.1, weight_decay=0.3), params, [grads, grads])[0].to_dict())


def test_a_bound_in_the_state():
    grads, clip = like(), inject(clip_by_global_norm, max_norm=1.0)
    assert (type(clip), clip.gives) == (Transform, "gradients")
    state = clip.init(grads).set(("hyper", "max_norm"), T(0.1))
    want, _ = clip_by_global_norm(0.1).update(grads, state, grads)
    assert_close(clip.update(grads, state, grads)[0].to_dict(), want.to_dict())


def test_the_rate_of_a_schedule_can_be_read():
    rate, params, grads = cosine(0.1, 10, 3), like(), like()
    opt, state, mine, read = inject(sgd, lr=rate), inject(sgd, lr=rate).init(params), params, []
    for _ in range(6):
        mine, state = opt.update(grads, state, mine)
        read.append(state["hyper", "lr"])
    assert_close(torch.stack(read), rate(torch.arange(6)))
    assert_close(mine.to_dict(), runs(sgd(rate), params, [grads] * 6)[0].to_dict())


# -- averages


def test_ema_is_that_of_torch():
    net = nn.Linear(3, 2)
    theirs = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(net)
    opt = chain(sgd(0.1), ema(0.9))
    params, state = from_module(net), opt.init(from_module(net))
    for _ in range(10):
        params, state = opt.update(params.apply(torch.randn_like), state, params)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(params[name])
        theirs.update_parameters(net)
    assert_close(averaged(state).to_dict(), from_module(theirs.module).to_dict())


def test_ema_of_small_floats_and_integers():
    average, params = ema(0.999), TensorDict({"w": torch.ones(2, dtype=torch.bfloat16), "n": T(1)})
    state = average.init(params)
    for n in range(3):
        new, state = average.update(params * 2 + n, state, params)
        assert new["n"] == 2 + n
    assert averaged(state)["w"].dtype == torch.float32
    assert_close(averaged(state)["w"], torch.full((2,), 1.006), rtol=0, atol=1e-5)
    assert averaged(state)["n"] == 4


def test_lookahead_is_that_of_the_paper():
    params, grads, inner = like(), [like() for _ in range(50)], adamw(0.1)
    slow = fast = params
    state = inner.init(params)
    for n, g in enumerate(grads, 1):
        fast, state = inner.update(g, state, fast)
        if n % 6 == 0:
            slow = fast = slow + 0.3 * (fast - slow)
    new, after = runs(chain(inner, lookahead(6, 0.3)), params, grads)
    assert_close(new.to_dict(), fast.to_dict(), rtol=1e-4, atol=1e-5)
    assert_close(averaged(after).to_dict(), slow.to_dict(), rtol=1e-4, atol=1e-5)


def test_averages_of_a_schedule_free_optimiser():
    params, grads = like(), [like() for _ in range(9)]
    new, state = runs(chain(clip_by_value(1.0), schedule_free_adamw(0.1)), params, grads)
    held = TensorDict({"optimizer": state, "params": new})
    assert averaged(held).keys(True, True) == params.keys(True, True)
    mixed = state["1", "fast"] * 0.1 + averaged(state) * 0.9
    assert_close(new.to_dict(), mixed.to_dict())
    assert_close(schedule_free_adamw(0.0).init(params)["average"].to_dict(), params.to_dict())
    assert runs(schedule_free_adamw(0.0), params, grads[:2])[0]["body", "bias"].isfinite().all()


# -- around an optimiser


def test_many_calls_are_one_step():
    params, grads, inner = like(), [like() for _ in range(6)], sgd(cosine(0.1, 5), momentum=0.9)
    opt, state, mine = multi_steps(inner, 3), multi_steps(inner, 3).init(params), params
    means = [(grads[i] + grads[i + 1] + grads[i + 2]) / 3 for i in (0, 3)]
    for n, g in enumerate(grads, 1):
        mine, state = opt.update(g, state, mine)
        assert_close(mine.to_dict(), runs(inner, params, means[: n // 3])[0].to_dict())
    assert state["inner", "step"] == 2
    assert state["sum"].apply(lambda x: x.abs().amax()).apply(lambda x: None if x == 0 else x).keys(True, True) == ()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_is_left_out(bad: float):
    params, opt = like(), skip_nonfinite(adamw(0.1))
    fine = [like() for _ in range(3)]
    wrong = fine[0].set(("body", "bias"), T([0.0, bad, 0.0]))
    new, state = runs(opt, params, [fine[0], wrong, fine[1], wrong, fine[2]])
    want, inner = runs(adamw(0.1), params, fine)
    assert_close(new.to_dict(), want.to_dict())
    assert_close(state["inner"].to_dict(), inner.to_dict())
    assert state["skipped"] == 2


def test_master_weights_are_a_float32_run_rounded():
    params, grads = like(dtype=torch.bfloat16), [like(dtype=torch.bfloat16) for _ in range(50)]
    new, state = runs(master_weights(adamw(1e-3)), params, grads)
    want, inner = runs(adamw(1e-3), params.float(), [g.float() for g in grads])
    assert_close(state["master"].to_dict(), want.to_dict(), rtol=0, atol=0)
    assert_close(state["inner"].to_dict(), inner.to_dict(), rtol=0, atol=0)
    assert_close(new.to_dict(), want.bfloat16().to_dict(), rtol=0, atol=0)
    lost, _ = runs(adamw(1e-3), params, grads)
    assert not lost["body", "weight"].equal(new["body", "weight"])
    mixed = params.set(("body", "bias"), torch.ones(3))
    assert master_weights(sgd()).init(mixed)["master"].keys() == ("body", "norm", "head")
    assert ("body", "bias") not in master_weights(sgd()).init(mixed)["master"]


# -- gradients


def test_clips_are_those_of_torch():
    grads = like()
    for clip, theirs in ((clip_by_value(0.3), "value"), (clip_by_norm(0.7), "norm")):
        found, _ = clip.update(grads, clip.init(grads), grads)
        for key, g in grads.items(True, True):
            p = nn.Parameter(torch.zeros_like(g))
            p.grad = g.clone()
            if theirs == "norm":
                torch.nn.utils.clip_grad_norm_([p], 0.7)
            else:
                torch.nn.utils.clip_grad_value_([p], 0.3)
            assert_close(found[key], p.grad)
    half = clip_by_value(0.3).update(grads.bfloat16(), TensorDict({}), grads)[0]
    assert half["head", "weight"].dtype == torch.bfloat16
    numbers = TensorDict({"c": torch.complex(T([3.0, 0.1]), T([0.2, -4.0]))})
    found = clip_by_value(1.0).update(numbers, TensorDict({}), numbers)[0]["c"]
    assert_close(found, torch.complex(T([1.0, 0.1]), T([0.2, -1.0])))


def test_noise_is_normal_and_part_of_the_state():
    params = TensorDict({"a": torch.zeros(200, 300), "b": torch.zeros(1000), "n": T(3)})
    add = noise(eta=0.09, gamma=0.5, seed=7)
    grads, state = params.delete("n"), add.init(params)
    first, after = add.update(grads, state, params)
    again, _ = add.update(grads, state, params)
    later, _ = add.update(grads, after.set("step", T(3)), params)
    assert first["a"].equal(again["a"])
    x = first["a"].flatten()
    assert abs(x.mean()) < 0.005
    assert_close(x.std(), T(0.3), rtol=0.02, atol=0)
    assert_close(((x / 0.3).abs() < 1).float().mean(), T(0.6827), rtol=0.01, atol=0)
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([x, later["a"].flatten()]))[0, 1]) < 0.02
    assert_close(later["a"].std(), T(0.3 / 2**0.5), rtol=0.02, atol=0)
    assert not noise(0.09, seed=8).update(grads, noise(0.09, seed=8).init(params), params)[0]["a"].equal(first["a"])
    stacked = torch.stack([grads, grads])
    both, _ = add.update(stacked, add.init(stacked), stacked)
    mapped, _ = torch.vmap(add.update)(stacked, add.init(stacked), stacked)
    assert not both["a"][0].equal(both["a"][1])
    assert mapped["a"].equal(both["a"])
    complex_noise = add.update(TensorDict({"c": torch.zeros(9, dtype=torch.complex64)}), state, params)[0]["c"]
    assert complex_noise.imag.std() > 0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["noise", "all"])
def test_inductor_gives_the_numbers_of_eager(name: str):
    opt, params, grads = ALL[name](), like(), [like() for _ in range(4)]
    compiled = torch.compile(opt.update, fullgraph=True)
    for a, b in zip(runs(opt, params, grads, compiled), runs(opt, params, grads), strict=True):
        assert_close(a.to_dict(), b.to_dict(), rtol=1e-5, atol=1e-5)
