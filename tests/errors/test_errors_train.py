"""What `train_step` and `checkpoint` say to wrong losses, optimisers, states and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, Texts, says
from torch import nn

import tdc
from tdc import TensorDict
from tdc.compile import checkpoint, checkpoint_blocks, train_step
from tdc.optim import Optimizer, sgd


def first(params: TensorDict, batch: torch.Tensor) -> torch.Tensor:
    return (params["w"] * batch).sum()


W, X = TensorDict({"w": torch.ones(2)}), torch.ones(3, 2)


def taken(loss_fn: Any, batch: Any = X, optimizer: Any = None, **options: Any) -> Any:
    step = train_step(loss_fn, optimizer or sgd(0.1), compile=False, **options)
    return step(step.init(W), batch)


def of_net(loss: Any = None, **options: Any) -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return train_step(net, loss or (lambda net, x: net(x).sum()), sgd(0.1), compile=False, **options)


SAYS: dict[str, Says] = {
    "net": (lambda: train_step("net", first, sgd(0.1)), """\
DtypeError
tdc.compile.train_step: expected a module, got str
hint: train_step(net, loss, optimizer), or train_step(loss_fn, optimizer)"""),
    "net, 2": (lambda: train_step(nn.Linear(2, 2), sgd(0.1)), """\
DtypeError
tdc.compile.train_step: expected a function as loss, got Linear
hint: def loss(params, batch): ...  or train_step(net, loss, optimizer)"""),
    "net, 3": (lambda: of_net(lambda net: net.weight.sum()), """\
DtypeError
tdc.compile.train_step: expected a loss of 2 arguments, got one of 1
hint: def loss(net, batch): ..."""),
    "net, 4": (lambda: of_net(buffers=True), """\
DtypeError
tdc.compile.train_step: expected buffers=True for a loss of parameters only, got buffers=True
hint: leave buffers out: those of the net are in the state"""),
    "net, 5": (lambda: train_step(lambda p, x, weight: first(p, x), sgd(0.1)), """\
DtypeError
tdc.compile.train_step: expected a loss of 2 arguments, got one of 3
hint: def loss(params, batch): ...  or buffers=True, or batch=(x, weight)"""),
    "net, 6": (lambda: of_net().init(TensorDict({"0": {"weight": torch.ones(3, 2), "wieght": torch.ones(2)}})), """\
StructureError
tdc.compile.train_step.init: expected parameters of Sequential, got 2 that differ
at 0.weight: Tensor float32[3, 2], in the net Tensor float32[2, 2]
at 0.wieght: Tensor float32[2], in the net nothing
hint: parameters nested and named as tdc.from_module(net)"""),
    "net, 7": (lambda: of_net().init(tdc.from_module(nn.Linear(2, 2)), buffers=TensorDict({})), """\
StructureError
tdc.compile.train_step.init: expected parameters of Sequential, got 2 that differ
at weight: Tensor float32[2, 2], in the net nothing
at bias: Tensor float32[2], in the net nothing
hint: parameters nested and named as tdc.from_module(net)"""),
    "net, 8": (lambda: of_net().init([torch.ones(2)]), """\
DtypeError
tdc.compile.train_step.init: expected a module or a TensorDict of parameters, got list
hint: step.init(), which takes those of the net"""),
    "net, 9": (lambda: of_net().init(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)), """\
StructureError
tdc.compile.train_step.init: expected parameters that require grad, got none
hint: net.requires_grad_(True), or p.requires_grad_(True) of those that shall learn"""),
    "net, 10": (lambda: of_net()(of_net().init(), X.to("meta")), """\
StructureError
tdc.compile.train_step: expected a batch on cpu, where the parameters are, got 1 leaves elsewhere
at leaf 0 of the batch: Tensor float32[3, 2] on meta
hint: batch.to('cpu'), or init the step with net.to(device)"""),
    "settings": (lambda: taken(first, metrics=("norm",)), """\
StructureError
tdc.compile.train_step: expected metrics among loss, grad_norm, lr, tokens, rows, skipped, scale, finite, got 'norm'
hint: others come from the loss: return loss, {'name': metric}"""),
    "settings, 2": (lambda: taken(first, metrics="skipped"), """\
StructureError
tdc.compile.train_step: expected metrics that this step has, got skipped
hint: skip_nonfinite=True for 'skipped', dtype=torch.float16 for 'scale'"""),
    "settings, 3": (lambda: taken(first, metrics=7), """\
StructureError
tdc.compile.train_step: expected metrics among loss, grad_norm, lr, tokens, rows, skipped, scale, finite, got int
hint: others come from the loss: return loss, {'name': metric}"""),
    "settings, 4": (
        lambda: taken(first, metrics="lr", optimizer=Optimizer(lambda p: TensorDict({}), lambda g, s, p: (p, s))), """\
StructureError
tdc.compile.train_step: expected an optimizer that tells its rate, for metrics 'lr', got none
hint: one of tdc.optim, or one that keeps 'lr' in its state"""),
    "settings, 5": (lambda: taken(first, skip_nonfinite=True, error_if_nonfinite=True), """\
StructureError
tdc.compile.train_step: expected one of skip_nonfinite and error_if_nonfinite, got both
hint: skip_nonfinite=True leaves such steps out, error_if_nonfinite=True raises"""),
    "settings, 6": (lambda: taken(first, X * torch.inf, error_if_nonfinite=True), """\
NonfiniteError
tdc.compile.train_step: expected a finite loss with finite gradients, got a loss that is not
at step 1
hint: skip_nonfinite=True leaves it out; compile=False in torch.autograd.detect_anomaly() names the operation"""),
    "settings, 7": (lambda: taken(first, metrics=("tokens",)), """\
StructureError
tdc.compile.train_step: expected tokens to count, for metrics 'tokens', got a dense batch and a loss without a count
hint: return (sum, count)"""),
    "settings, 8": (lambda: taken(lambda p, x: (first(p, x), {"rows": 2}), metrics=("rows",)), """\
StructureError
tdc.compile.train_step: expected metrics of other names, got rows
hint: rename it, or leave it out of metrics="""),
    "settings, 9": (lambda: taken(first, average=0.9), """\
DtypeError
tdc.compile.train_step: expected an average with init and update, got float without init and update
hint: tdc.optim.ema(0.999)"""),
    "settings, 10": (
        lambda: train_step(first, sgd(0.1), compile=False).eval(averaged=True)(
            train_step(first, sgd(0.1)).init(W), X
        ), """\
StructureError
tdc.compile.train_step.eval: expected a state with an average, got one without
hint: train_step(..., average=tdc.optim.ema(0.999))"""),
    "settings, 11": (lambda: train_step(first, sgd(0.1)).eval(3), """\
DtypeError
tdc.compile.train_step.eval: expected a function, got int
hint: the function itself, e.g. torch.relu"""),
    "settings, 12": (lambda: train_step(first, sgd(0.1)).eval(metrics=("lr",)), """\
StructureError
tdc.compile.train_step: expected metrics among loss, tokens, rows, got 'lr'
hint: others come from the loss: return loss, {'name': metric}"""),
    "settings, 13": (lambda: train_step(first, sgd(0.1), compile=False).eval().counts, """\
StructureError
tdc.compile.train_step.eval.counts: expected a compiled step, got compile=False
hint: leave compile out"""),
    "loss": (lambda: taken(lambda p, x: p["w"] * x), """\
ShapeError
tdc.compile.train_step: expected a loss of one number, got Tensor float32[3, 2]
hint: loss.mean()"""),
    "loss, 2": (lambda: taken(lambda p, x: 3), """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got int
hint: return a number, (sum, count), or either with a dict of metrics"""),
    "loss, 3": (lambda: taken(lambda p, x: None), """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got NoneType
hint: return a number, (sum, count), or either with a dict of metrics"""),
    "loss, 4": (lambda: taken(lambda p, x: x.sum().long()), """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got Tensor int64[]
hint: return a number, (sum, count), or either with a dict of metrics"""),
    "loss, 5": (lambda: taken(lambda p, x: (first(p, x), 2, 3)), """\
DtypeError
tdc.compile.train_step: expected a loss that returns a number or (sum, count), got 3 results
hint: return loss, (sum, count), or (loss, {'name': metric})"""),
    "loss, 6": (lambda: taken(lambda p, x: (first(p, x), "four")), """\
DtypeError
tdc.compile.train_step: expected a pair of sum and count, got str
hint: return (sum, mask.sum()), or (loss, {'name': metric})"""),
    "loss, 7": (lambda: taken(lambda p, x: (first(p, x), x)), """\
ShapeError
tdc.compile.train_step: expected a count of one number, got Tensor float32[3, 2]
hint: return (sum, mask.sum()), or (loss, {'name': metric})"""),
    "loss, 8": (lambda: taken(lambda p, x: (first(p, x), {"loss": x})), """\
StructureError
tdc.compile.train_step: expected metrics beside the loss, got one called 'loss'
hint: rename it"""),
    "loss, 9": (lambda: taken(lambda p, b, x: (first(p, x), TensorDict({"mean": x})), buffers=True), """\
StructureError
tdc.compile.train_step: expected buffers of the keys that went in, got TensorDict []
hint: return loss, buffers: those that the module left behind"""),
    "what it is made of": (lambda: train_step(lambda p: p["w"].sum(), sgd(0.1)), """\
DtypeError
tdc.compile.train_step: expected a loss of 2 arguments, got one of 1
hint: def loss(params, batch): ..."""),
    "what it is made of, 2": (lambda: train_step(None, sgd(0.1)), """\
DtypeError
tdc.compile.train_step: expected a function as loss, got NoneType
hint: def loss(params, batch): ...  or train_step(net, loss, optimizer)"""),
    "what it is made of, 3": (lambda: train_step(first, torch.optim.SGD([torch.ones(1)])), """\
DtypeError
tdc.compile.train_step: expected an optimizer with init and update, got SGD without init and update
hint: tdc.optim.adamw(1e-3)"""),
    "what it is made of, 4": (lambda: train_step(first, sgd), """\
DtypeError
tdc.compile.train_step: expected an optimizer with init and update, got function without init and update
hint: tdc.optim.adamw(1e-3)"""),
    "what it is made of, 5": (lambda: train_step(first, sgd(0.1), dtype=torch.float64), """\
DtypeError
tdc.compile.train_step: expected dtype=torch.bfloat16 or torch.float16, got torch.float64
hint: torch.bfloat16, torch.float16, or None"""),
    "what it is made of, 6": (lambda: train_step(first, sgd(0.1), accumulate=0), """\
ShapeError
tdc.compile.train_step: expected accumulate of at least 1, got 0
hint: 1 takes the batch as it is"""),
    "what it is made of, 7": (lambda: train_step(first, sgd(0.1), compile=False).init([torch.ones(2)]), """\
DtypeError
tdc.compile.train_step.init: expected a module or a TensorDict of parameters, got list
hint: step.init(net), or step.init(tdc.from_module(net, buffers=False))"""),
    "what it is made of, 8": (lambda: train_step(first, sgd(0.1), compile=False).counts, """\
StructureError
tdc.compile.train_step.counts: expected a compiled step, got compile=False
hint: leave compile out"""),
    "checkpoint": (lambda: checkpoint(3), """\
DtypeError
tdc.compile.checkpoint: expected a function or a module, got int
hint: checkpoint(layer)(x)"""),
    "checkpoint, 2": (lambda: checkpoint(torch.tanh, policy=3), """\
DtypeError
tdc.compile.checkpoint: expected a policy that is a function or operations, got int
hint: policy=[torch.ops.aten.mm]"""),
    "checkpoint, 3": (lambda: checkpoint_blocks(torch.tanh, nn.Linear), """\
DtypeError
tdc.compile.checkpoint_blocks: expected a module, got builtin_function_or_method
hint: checkpoint_blocks(net, nn.TransformerEncoderLayer)"""),
    "checkpoint, 4": (lambda: checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)), (nn.ReLU, nn.GELU)), """\
StructureError
tdc.compile.checkpoint_blocks: expected a module with a ReLU or GELU, got one of Linear, Sequential
hint: name one of these"""),
}  # fmt: skip
test_says = says(SAYS)


class TestErrors(Texts):
    def test_state_and_batch(self):
        step = train_step(first, sgd(0.1), compile=False)
        self.says(lambda: step(W, X), """\
StructureError
tdc.compile.train_step: expected a state made by init, got one without params, optimizer, step
hint: state = step.init(net)""")  # fmt: skip
        self.says(lambda: step(None, X), """\
DtypeError
tdc.compile.train_step: expected a state made by init, got NoneType
hint: state = step.init(net)""")  # fmt: skip
        self.says(lambda: step(step.init(W), None), """\
DtypeError
tdc.compile.train_step: expected a batch, got None
hint: step(state, batch)""")  # fmt: skip
        momentum = train_step(first, sgd(0.1, momentum=0.9), compile=False)
        self.says(lambda: step(momentum.init(W), X), """\
StructureError
tdc.optim.sgd: expected a state with keys step, got keys momentum, step
hint: make the state with init of the same optimiser""")  # fmt: skip
        self.says(lambda: taken(first, accumulate=4), """\
ShapeError
tdc.compile.train_step: expected a batch of at least 4 rows, got 3
hint: accumulate=1, or larger batches""")  # fmt: skip
        self.says(lambda: taken(first, TensorDict({"x": X}), accumulate=2), """\
ShapeError
tdc.compile.train_step: expected a batch with a first dim to split, got TensorDict []
hint: give the batch its batch_size, or accumulate=1""")  # fmt: skip
        growing = Optimizer(sgd(0.1).init, lambda g, s, p: (p, s.set("more", s["step"])))
        step = train_step(first, growing, compile=False)
        self.says(lambda: step(step.init(W), X), """\
StructureError
tdc.compile.train_step: expected an optimizer whose update keeps the form of params and state, got 1 leaves that change
at optimizer.more: not there before
hint: return what init made, updated""")  # fmt: skip

    def test_load_state_dict(self):
        step = train_step(first, sgd(0.1), compile=False)
        saved = {"params.w": torch.ones(3), "step": torch.tensor(0), "optimizer.mean.w": torch.ones(2)}
        self.says(lambda: step.load_state_dict(step.init(W), saved), """\
StructureError
tdc.compile.train_step.load_state_dict: expected entries of this state, got 3 entries that differ
at params.w: Tensor float32[3], wanted Tensor float32[2]
at optimizer.step: missing, wanted Tensor int64[]
at optimizer.mean.w: Tensor float32[2], not wanted
hint: load it into a state of the same step and module""")  # fmt: skip


def test_errors_under_compile_keep_their_text():
    step = train_step(lambda p, x: p["w"] * x, sgd(0.1), backend="eager")
    with pytest.raises(Exception, match=r"tdc\.compile\.train_step: expected a loss of one number"):
        step(step.init(W), X)
