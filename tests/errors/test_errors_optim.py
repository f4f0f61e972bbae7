"""What optimisers say to wrong settings, states and gradients."""

from __future__ import annotations

import torch
from texts import T, Texts

from tdc import TensorDict
from tdc.optim import adam, adamw, chain, clip_by_global_norm, constant, cosine, ema, lion, sgd

SHAPES = {("layer", "weight"): (3, 4), ("layer", "bias"): (3,), "scale": ()}


def like(dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = ()) -> TensorDict:
    return TensorDict({k: torch.randn((*batch, *s), dtype=dtype) for k, s in SHAPES.items()}, batch)


class TestErrors(Texts):
    def test_settings_out_of_range(self):
        self.says(
            lambda: adamw(-1.0, eps=-1e-8),
            """\
StructureError
tdc.optim.adamw: expected numbers of at least 0, got lr=-1, eps=-1e-08
hint: give one in that range""",
        )
        self.says(
            lambda: adam(betas=(0.9, 1.0)),
            """\
StructureError
tdc.optim.adam: expected numbers in [0, 1), got beta2=1
hint: give one in that range""",
        )
        self.says(
            lambda: lion(weight_decay=-1.0),
            """\
StructureError
tdc.optim.lion: expected numbers of at least 0, got weight_decay=-1
hint: give one in that range""",
        )
        self.says(
            lambda: sgd(float("nan")),
            """\
StructureError
tdc.optim.sgd: expected numbers of at least 0, got lr=nan
hint: give one in that range""",
        )
        self.says(
            lambda: clip_by_global_norm(-1.0),
            """\
StructureError
tdc.optim.clip_by_global_norm: expected numbers of at least 0, got max_norm=-1
hint: give one in that range""",
        )
        self.says(
            lambda: ema(1.5),
            """\
StructureError
tdc.optim.ema: expected numbers in [0, 1), got decay=1.5
hint: give one in that range""",
        )

    def test_nesterov_needs_momentum(self):
        self.says(
            lambda: sgd(0.1, nesterov=True),
            """\
StructureError
tdc.optim.sgd: expected momentum and no dampening for nesterov, got momentum=0, dampening=0
hint: sgd(lr, momentum=0.9, nesterov=True)""",
        )
        self.says(
            lambda: sgd(0.1, 0.9, 0.5, nesterov=True),
            """\
StructureError
tdc.optim.sgd: expected momentum and no dampening for nesterov, got momentum=0.9, dampening=0.5
hint: sgd(lr, momentum=0.9, nesterov=True)""",
        )

    def test_schedules(self):
        self.says(
            lambda: cosine(0.1, steps=10, warmup=10),
            """\
StructureError
tdc.optim.cosine: expected more steps than warmup, got steps=10, warmup=10
hint: steps counts the warm-up, too""",
        )
        self.says(
            lambda: constant(-0.1),
            """\
StructureError
tdc.optim.constant: expected numbers of at least 0, got lr=-0.1
hint: give one in that range""",
        )

    def test_gradients_of_other_parameters(self):
        params, opt = like().set("count", T(1)), adamw()
        self.says(
            lambda: opt.update(params.set("w", T(1.0)), opt.init(params), params),
            """\
StructureError
tdc.optim.adamw: expected gradients of keys that params has, got 1 of other keys
at w: Tensor float32[]
hint: take them with tdc.grad of these parameters""",
        )
        self.says(
            lambda: opt.update(params, opt.init(params), params),
            """\
DtypeError
tdc.optim.adamw: expected gradients of floating-point tensors, got 1 of other kinds
at count: Tensor int64[]
hint: leave these out of grads""",
        )
        other = TensorDict({"scale": torch.ones(2)})
        self.says(
            lambda: opt.update(other, opt.init(params), params),
            """\
ShapeError
tdc.optim.adamw: expected gradients with the shapes of params, got 1 that differ
at scale: gradient Tensor float32[2], parameter Tensor float32[]
hint: take them with tdc.grad of these parameters""",
        )

    def test_state_of_other_parameters(self):
        params, opt = like(), adamw()
        self.says(
            lambda: opt.update(params, opt.init(params.select("scale")), params),
            """\
StructureError
tdc.optim.adamw: expected a state of these params, got 4 leaves that differ
at mean.layer.weight: nothing, in params Tensor float32[3, 4]
at mean.layer.bias: nothing, in params Tensor float32[3]
at square.layer.weight: nothing, in params Tensor float32[3, 4]
at square.layer.bias: nothing, in params Tensor float32[3]
hint: make the state with init(params) of these parameters""",
        )
        self.says(
            lambda: opt.update(params, opt.init(like(batch=(2,))[:1]), params),
            """\
StructureError
tdc.optim.adamw: expected a state of these params, got 7 leaves that differ
at mean.layer.weight: Tensor float32[1, 3, 4], in params Tensor float32[3, 4]
at mean.layer.bias: Tensor float32[1, 3], in params Tensor float32[3]
at mean.scale: Tensor float32[1], in params Tensor float32[]
at square.layer.weight: Tensor float32[1, 3, 4], in params Tensor float32[3, 4]
at square.layer.bias: Tensor float32[1, 3], in params Tensor float32[3]
at square.scale: Tensor float32[1], in params Tensor float32[]
at step: Tensor int64[1], in params batch_size []
hint: make the state with init(params) of these parameters""",
        )
        self.says(
            lambda: sgd().update(params, sgd().init(like(batch=(2,))), params),
            """\
StructureError
tdc.optim.sgd: expected a state of these params, got 1 leaves that differ
at step: Tensor int64[2], in params batch_size []
hint: make the state with init(params) of these parameters""",
        )
        self.says(
            lambda: opt.update(params, sgd().init(params), params),
            """\
StructureError
tdc.optim.adamw: expected a state with keys mean, square, step, got keys step
hint: make the state with init of the same optimiser""",
        )
        self.says(
            lambda: ema(0.9).update(params.select("scale"), params),
            """\
StructureError
tdc.optim.ema: expected a mean of these params, got 2 leaves that differ
at layer.weight: nothing, in params Tensor float32[3, 4]
at layer.bias: nothing, in params Tensor float32[3]
hint: make the mean with init(params) of these parameters""",
        )

    def test_chains(self):
        self.says(
            lambda: chain(),
            """\
DtypeError
tdc.optim.chain: expected Transforms, then one Optimizer, got 1 out of place
at part 0: missing
hint: chain(clip_by_global_norm(1.0), adamw(1e-3))""",
        )
        self.says(
            lambda: chain(adamw(), clip_by_global_norm(1.0)),
            """\
DtypeError
tdc.optim.chain: expected Transforms, then one Optimizer, got 2 out of place
at part 0: Optimizer
at part 1: Transform
hint: chain(clip_by_global_norm(1.0), adamw(1e-3))""",
        )
        opt = chain(clip_by_global_norm(1.0), adamw())
        self.says(
            lambda: opt.update(like(), adamw().init(like()), like()),
            """\
StructureError
tdc.optim.chain: expected a state with keys 0, 1, got keys mean, square, step
hint: make the state with init of the same optimiser""",
        )
