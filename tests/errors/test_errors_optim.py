"""What optimisers say to wrong settings, states and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, T, Texts, says

from tdc import DtypeError, TensorDict
from tdc.optim import (
    LossScale,
    adafactor,
    adam,
    adamw,
    averaged,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    decay,
    ema,
    inject,
    join,
    lamb,
    lion,
    masked,
    multi_steps,
    muon,
    noise,
    one_cycle,
    partition,
    piecewise,
    sgd,
    skip_nonfinite,
    wsd,
)

SHAPES = {("layer", "weight"): (3, 4), ("layer", "bias"): (3,), "scale": ()}


def like(dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = ()) -> TensorDict:
    return TensorDict({k: torch.randn((*batch, *s), dtype=dtype) for k, s in SHAPES.items()}, batch)


SAYS: dict[str, Says] = {
    "settings out of range": (lambda: adamw(-1.0, eps=-1e-8), """\
StructureError
tdc.optim.adamw: expected numbers of at least 0, got lr=-1, eps=-1e-08
hint: give one in that range"""),
    "settings out of range, 2": (lambda: adam(betas=(0.9, 1.0)), """\
StructureError
tdc.optim.adam: expected numbers in [0, 1), got beta2=1
hint: give one in that range"""),
    "settings out of range, 3": (lambda: lion(weight_decay=-1.0), """\
StructureError
tdc.optim.lion: expected numbers of at least 0, got weight_decay=-1
hint: give one in that range"""),
    "settings out of range, 4": (lambda: sgd(float("nan")), """\
StructureError
tdc.optim.sgd: expected numbers of at least 0, got lr=nan
hint: give one in that range"""),
    "settings out of range, 5": (lambda: clip_by_global_norm(-1.0), """\
StructureError
tdc.optim.clip_by_global_norm: expected numbers of at least 0, got max_norm=-1
hint: give one in that range"""),
    "settings out of range, 6": (lambda: ema(1.5), """\
StructureError
tdc.optim.ema: expected numbers in [0, 1), got decay=1.5
hint: give one in that range"""),
    "every number is checked": (lambda: adafactor(d=0.5), """\
StructureError
tdc.optim.adafactor: expected d of at least 1, got d=0.5
hint: d=1.0: steps are clipped where their root mean square is larger"""),
    "every number is checked, 2": (lambda: sgd(0.1, 0.9, dampening=float("nan")), """\
StructureError
tdc.optim.sgd: expected numbers of at least 0, got dampening=nan
hint: give one in that range"""),
    "every number is checked, 3": (lambda: muon(ns_coefficients=(3.0, float("inf"), 2.0)), """\
StructureError
tdc.optim.muon: expected finite ns_coefficients, got (3.0, inf, 2.0)
hint: ns_coefficients=(3.4445, -4.775, 2.0315)"""),
    "every number is checked, 4": (lambda: one_cycle(0.1, 10, div_factor=0.0), """\
StructureError
tdc.optim.one_cycle: expected rates divided by more than 0, got div_factor=0, final_div_factor=10000
hint: div_factor=25.0"""),
    "nesterov needs momentum": (lambda: sgd(0.1, nesterov=True), """\
StructureError
tdc.optim.sgd: expected momentum and no dampening for nesterov, got momentum=0, dampening=0
hint: sgd(lr, momentum=0.9, nesterov=True)"""),
    "nesterov needs momentum, 2": (lambda: sgd(0.1, 0.9, 0.5, nesterov=True), """\
StructureError
tdc.optim.sgd: expected momentum and no dampening for nesterov, got momentum=0.9, dampening=0.5
hint: sgd(lr, momentum=0.9, nesterov=True)"""),
    "schedules": (lambda: cosine(0.1, steps=10, warmup=10), """\
StructureError
tdc.optim.cosine: expected more steps than warmup, got steps=10, warmup=10
hint: steps counts the warm-up, too"""),
    "schedules, 2": (lambda: constant(-0.1), """\
StructureError
tdc.optim.constant: expected numbers of at least 0, got lr=-0.1
hint: give one in that range"""),
    "hyperparameters": (lambda: inject(adamw, amsgrad=True), """\
DtypeError
tdc.optim.inject: expected floats, tensors or schedules by name, got none
hint: inject(adamw, lr=1e-3, weight_decay=0.1)"""),
    "hyperparameters, 2": (lambda: inject(torch.relu, input=T(1.0)), """\
DtypeError
tdc.optim.inject: expected a Transform, got Tensor float32[]
hint: clip_by_global_norm(1.0), or adamw(1e-3)"""),
    "hyperparameters, 3": (lambda: inject(adamw, lr=T([0.1, 0.2])).init(like()), """\
ShapeError
tdc.optim.inject: expected a learning rate of one number, or one for each model, got Tensor float32[2] \
for batch_size []
hint: a tensor for stacked parameters outside of vmap, which optimisers take as they are"""),
    "more schedules": (lambda: wsd(0.1, 10, 6, 5), """\
StructureError
tdc.optim.wsd: expected at least as many steps as warmup and decay, got steps=10, warmup=6, decay=5
hint: steps counts all"""),
    "more schedules, 2": (lambda: join([constant(0.1), constant(0.2)], [5, 6]), """\
StructureError
tdc.optim.join: expected a boundary between each two schedules, got 2 schedules and 2 boundaries
hint: join([linear(0.0, 1e-3, 100), cosine(1e-3, 900)], [100])"""),
    "more schedules, 3": (lambda: piecewise(0.1, [5, 3]), """\
StructureError
tdc.optim.piecewise: expected milestones in order, from 0 on, got [5, 3]
hint: milestones=[100, 200]"""),
    "more schedules, 4": (lambda: piecewise(0.1, [3, 5], [0.1]), """\
StructureError
tdc.optim.piecewise: expected one factor for each milestone, got 1 for 2
hint: gamma=0.1 is that of all"""),
    "more schedules, 5": (lambda: one_cycle(0.1, 10, anneal_strategy="cosine"), """\
StructureError
tdc.optim.one_cycle: expected 'cos' or 'linear', got 'cosine'
hint: anneal_strategy='cos'"""),
}  # fmt: skip
test_says = says(SAYS)


class TestErrors(Texts):
    def test_only_a_rate_may_be_a_schedule(self):
        schedule: Any = constant(0.1)
        for make in (
            lambda: adamw(schedule, weight_decay=schedule), lambda: clip_by_global_norm(schedule),
            lambda: adam(betas=(schedule, 0.9)), lambda: ema(schedule), lambda: LossScale(backoff_factor=schedule),
            lambda: constant(schedule), lambda: cosine(0.1, 10, floor=schedule),
        ):  # fmt: skip
            with pytest.raises(DtypeError, match=r"expected (numbers|a number), got"):
                make()
        inject(adamw, lr=schedule, weight_decay=schedule)

    def test_gradients_of_other_parameters(self):
        params, opt = like().set("count", T(1)), adamw()
        self.says(lambda: opt.update(params.set("w", T(1.0)), opt.init(params), params), """\
StructureError
tdc.optim.adamw: expected gradients of keys that params has, got 1 of other keys
at w: Tensor float32[]
hint: take them with tdc.grad of these parameters""")  # fmt: skip
        self.says(lambda: opt.update(params, opt.init(params), params), """\
DtypeError
tdc.optim.adamw: expected gradients of floating-point tensors, got 1 of other kinds
at count: Tensor int64[]
hint: leave these out of grads""")  # fmt: skip
        other = TensorDict({"scale": torch.ones(2)})
        self.says(lambda: opt.update(other, opt.init(params), params), """\
ShapeError
tdc.optim.adamw: expected gradients with the shapes of params, got 1 that differ
at scale: gradient Tensor float32[2], parameter Tensor float32[]
hint: take them with tdc.grad of these parameters""")  # fmt: skip

    def test_state_of_other_parameters(self):
        params, opt = like(), adamw()
        self.says(lambda: opt.update(params, opt.init(params.select("scale")), params), """\
StructureError
tdc.optim.adamw: expected a state of these params, got 4 leaves that differ
at mean.layer.weight: nothing, in params Tensor float32[3, 4]
at mean.layer.bias: nothing, in params Tensor float32[3]
at square.layer.weight: nothing, in params Tensor float32[3, 4]
at square.layer.bias: nothing, in params Tensor float32[3]
hint: make the state with init(params) of these parameters""")  # fmt: skip
        self.says(lambda: opt.update(params, opt.init(like(batch=(2,))[:1]), params), """\
StructureError
tdc.optim.adamw: expected a state of these params, got 7 leaves that differ
at mean.layer.weight: Tensor float32[1, 3, 4], in params Tensor float32[3, 4]
at mean.layer.bias: Tensor float32[1, 3], in params Tensor float32[3]
at mean.scale: Tensor float32[1], in params Tensor float32[]
at square.layer.weight: Tensor float32[1, 3, 4], in params Tensor float32[3, 4]
at square.layer.bias: Tensor float32[1, 3], in params Tensor float32[3]
at square.scale: Tensor float32[1], in params Tensor float32[]
at step: Tensor int64[1], in params batch_size []
hint: make the state with init(params) of these parameters""")  # fmt: skip
        self.says(lambda: sgd().update(params, sgd().init(like(batch=(2,))), params), """\
StructureError
tdc.optim.sgd: expected a state of these params, got 1 leaves that differ
at step: Tensor int64[2], in params batch_size []
hint: make the state with init(params) of these parameters""")  # fmt: skip
        self.says(lambda: opt.update(params, sgd().init(params), params), """\
StructureError
tdc.optim.adamw: expected a state with keys mean, square, step, got keys step
hint: make the state with init of the same optimiser""")  # fmt: skip
        self.says(lambda: ema(0.9).update(params, ema(0.9).init(params.select("scale")), params), """\
StructureError
tdc.optim.ema: expected an average of these params, got 2 leaves that differ
at layer.weight: nothing, in params Tensor float32[3, 4]
at layer.bias: nothing, in params Tensor float32[3]
hint: make the average with init(params) of these parameters""")  # fmt: skip

    def test_chains(self):
        self.says(lambda: chain(), """\
DtypeError
tdc.optim.chain: expected transforms, got none
hint: chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.999))""")  # fmt: skip
        self.says(lambda: chain(adamw, clip_by_global_norm(1.0)), """\
DtypeError
tdc.optim.chain: expected transforms, got 1 others
at part 0: function
hint: chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.999))""")  # fmt: skip
        self.says(lambda: chain(ema(0.9), adamw(), clip_by_global_norm(1.0), adamw()), """\
DtypeError
tdc.optim.chain: expected parts that take what the one before gives, got 2 that do not
at part 1: takes gradients, part 0 gives parameters
at part 2: takes gradients, part 1 gives parameters
hint: chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.999))""")  # fmt: skip
        opt = chain(clip_by_global_norm(1.0), adamw())
        self.says(lambda: opt.update(like(), adamw().init(like()), like()), """\
StructureError
tdc.optim.chain: expected a state with keys 0, 1, got keys mean, square, step
hint: make the state with init of the same optimiser""")  # fmt: skip

    def test_groups(self):
        params, grads = like(), like()
        self.says(lambda: masked(adamw(), "*.wieght").init(params), """\
KeyPathError
tdc.optim.masked: expected at least one leaf, got none that '*.wieght' chooses
hint: keys are 'layer.weight', 'layer.bias', 'scale'""")  # fmt: skip
        self.says(lambda: partition({"*.weight": adamw(), lambda key, p: p.ndim == 0: None}).init(params), """\
StructureError
tdc.optim.partition: expected a group for each leaf, got 1 in no group
at layer.bias
hint: '*': None as the last group leaves the others as they are""")  # fmt: skip
        self.says(lambda: partition({"*.bias": clip_by_global_norm(1.0), "*": adamw()}), """\
DtypeError
tdc.optim.partition: expected transforms of one kind, got 2 kinds
at 0: takes gradients, gives gradients
at 1: takes gradients, gives parameters
hint: all of them optimisers, or None""")  # fmt: skip
        self.says(lambda: masked(adamw(), 3), """\
DtypeError
tdc.optim.masked: expected a pattern of keys, several, or a function of key and leaf, got int
hint: '*.bias', ['*.bias', 'norm*'], or lambda key, leaf: leaf.ndim == 2""")  # fmt: skip
        opt = partition({"scale": None, "*": sgd()})
        self.says(lambda: opt.update(grads.set("other", T(1.0)), opt.init(params), params), """\
StructureError
tdc.optim.partition: expected gradients of keys that params has, got 1 of other keys
at other: Tensor float32[]
hint: take them with tdc.grad of these parameters""")  # fmt: skip

    def test_matrices_and_complex_numbers(self):
        self.says(lambda: muon().init(like()), """\
ShapeError
tdc.optim.muon: expected matrices, got 2 others
at layer.bias: Tensor float32[3]
at scale: Tensor float32[]
hint: partition({lambda path, p: p.ndim == 2: muon(), '*': adamw()})""")  # fmt: skip
        for make in (lamb, adafactor):
            self.says(lambda make=make: make().init(TensorDict({"w": torch.ones(2, dtype=torch.complex64)})), f"""\
DtypeError
tdc.optim.{make.__name__}: expected real parameters, got 1 complex ones
at w: Tensor complex64[2]
hint: leave these to adam with tdc.optim.partition""")  # fmt: skip

    def test_around_optimisers(self):
        self.says(lambda: multi_steps(clip_by_global_norm(1.0), 2), """\
DtypeError
tdc.optim.multi_steps: expected an Optimizer, got Transform
hint: adamw(1e-3)""")  # fmt: skip
        self.says(lambda: multi_steps(adamw(), 0), """\
ShapeError
tdc.optim.multi_steps: expected k of 1 or more, got 0
hint: k=1""")  # fmt: skip
        opt = multi_steps(sgd(), 2)
        self.says(lambda: opt.update(TensorDict({"scale": torch.ones(2)}), opt.init(like()), like()), """\
ShapeError
tdc.optim.multi_steps: expected gradients with the shapes of params, got 1 that differ
at scale: gradient Tensor float32[2], parameter Tensor float32[]
hint: take them with tdc.grad of these parameters""")  # fmt: skip
        self.says(lambda: skip_nonfinite(adamw()).update(like(), adamw().init(like()), like()), """\
StructureError
tdc.optim.skip_nonfinite: expected a state with keys inner, skipped, got keys mean, square, step
hint: make the state with init of the same optimiser""")  # fmt: skip
        self.says(lambda: decay(0.1).update(TensorDict({"scale": torch.ones(2)}), TensorDict({}), like()), """\
ShapeError
tdc.optim.decay: expected gradients with the shapes of params, got 1 that differ
at scale: gradient Tensor float32[2], parameter Tensor float32[]
hint: take them with tdc.grad of these parameters""")  # fmt: skip
        self.says(lambda: averaged(adamw().init(like())), """\
KeyPathError
tdc.optim.averaged: expected a state with one average, got 0
hint: chain(adamw(1e-3), ema(0.999)); of several read one, as in state['1', 'average']""")  # fmt: skip
        self.says(lambda: noise(0.1, seed=0.5), """\
DtypeError
tdc.optim.noise: expected an int, got float
hint: a Python number""")  # fmt: skip
        self.says(lambda: LossScale(init_scale=0.0), """\
StructureError
tdc.optim.LossScale: expected a scale above 0 and a growth above 1, got init_scale=0, growth_factor=2
hint: LossScale()""")  # fmt: skip
