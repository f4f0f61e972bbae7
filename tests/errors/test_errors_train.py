"""What `train_step` and `checkpoint` say to wrong losses, optimisers, states and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Texts
from torch import nn

from tdc import TensorDict
from tdc.compile import checkpoint, checkpoint_blocks, train_step
from tdc.optim import Optimizer, sgd


def first(params: TensorDict, batch: torch.Tensor) -> torch.Tensor:
    return (params["w"] * batch).sum()


W, X = TensorDict({"w": torch.ones(2)}), torch.ones(3, 2)


def taken(loss_fn: Any, batch: Any = X, **options: Any) -> Any:
    step = train_step(loss_fn, sgd(0.1), compile=False, **options)
    return step(step.init(W), batch)


class TestErrors(Texts):
    def test_loss(self):
        self.says(
            lambda: taken(lambda p, x: p["w"] * x),
            """\
ShapeError
tdc.compile.train_step: expected a loss of one number, got Tensor float32[3, 2]
hint: loss.mean()""",
        )
        self.says(
            lambda: taken(lambda p, x: 3),
            """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got int
hint: F.mse_loss(x, y)""",
        )
        self.says(
            lambda: taken(lambda p, x: None),
            """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got NoneType
hint: F.mse_loss(x, y)""",
        )
        self.says(
            lambda: taken(lambda p, x: x.sum().long()),
            """\
DtypeError
tdc.compile.train_step: expected a floating-point tensor as loss, got Tensor int64[]
hint: F.mse_loss(x, y)""",
        )
        self.says(
            lambda: taken(lambda p, x: (first(p, x), {"a": x})),
            """\
DtypeError
tdc.compile.train_step: expected a loss_fn that returns loss, got 2 results
hint: has_aux=True for metrics beside the loss""",
        )
        self.says(
            lambda: taken(first, has_aux=True),
            """\
DtypeError
tdc.compile.train_step: expected a loss_fn that returns loss, aux, got Tensor float32[]
hint: return all of them""",
        )
        self.says(
            lambda: taken(lambda p, x: (first(p, x), x), has_aux=True),
            """\
DtypeError
tdc.compile.train_step: expected a dict of metrics as aux, got Tensor float32[3, 2]
hint: return loss, {'name': aux}""",
        )
        self.says(
            lambda: taken(lambda p, x: (first(p, x), {"loss": x}), has_aux=True),
            """\
StructureError
tdc.compile.train_step: expected metrics beside the loss, got one called 'loss'
hint: rename it""",
        )
        self.says(
            lambda: taken(lambda p, b, x: (first(p, x), TensorDict({"mean": x}))),
            """\
StructureError
tdc.compile.train_step: expected buffers of the keys that went in, got TensorDict []
hint: return the buffers that the module left behind""",
        )

    def test_what_it_is_made_of(self):
        self.says(
            lambda: train_step(lambda p: p["w"].sum(), sgd(0.1)),
            """\
DtypeError
tdc.compile.train_step: expected a loss_fn of two or three arguments, got one of 1
hint: def loss_fn(params, batch): ... or def loss_fn(params, buffers, batch): ...""",
        )
        self.says(
            lambda: train_step(None, sgd(0.1)),
            """\
DtypeError
tdc.compile.train_step: expected a loss_fn of two or three arguments, got NoneType
hint: def loss_fn(params, batch): ... or def loss_fn(params, buffers, batch): ...""",
        )
        self.says(
            lambda: train_step(first, torch.optim.SGD([torch.ones(1)])),
            """\
DtypeError
tdc.compile.train_step: expected an optimizer with init and update, got SGD without init and update
hint: tdc.optim.adamw(1e-3)""",
        )
        self.says(
            lambda: train_step(first, sgd),
            """\
DtypeError
tdc.compile.train_step: expected an optimizer with init and update, got function without init and update
hint: tdc.optim.adamw(1e-3)""",
        )
        self.says(
            lambda: train_step(first, sgd(0.1), dtype=torch.float16),
            """\
DtypeError
tdc.compile.train_step: expected dtype=torch.bfloat16, got torch.float16
hint: torch.bfloat16, or None; float16 needs scaled losses""",
        )
        self.says(
            lambda: train_step(first, sgd(0.1), accumulate=0),
            """\
ShapeError
tdc.compile.train_step: expected accumulate of at least 1, got 0
hint: 1 takes the batch as it is""",
        )
        self.says(
            lambda: train_step(first, sgd(0.1), compile=False).init([torch.ones(2)]),
            """\
DtypeError
tdc.compile.train_step.init: expected a module or a TensorDict of parameters, got list
hint: step.init(net), or step.init(tdc.from_module(net, buffers=False))""",
        )
        self.says(
            lambda: train_step(first, sgd(0.1), compile=False).counts,
            """\
StructureError
tdc.compile.train_step.counts: expected a compiled step, got compile=False
hint: leave compile out""",
        )

    def test_state_and_batch(self):
        step = train_step(first, sgd(0.1), compile=False)
        self.says(
            lambda: step(W, X),
            """\
StructureError
tdc.compile.train_step: expected a state made by init, got one without params, optimizer, step
hint: state = step.init(net)""",
        )
        self.says(
            lambda: step(None, X),
            """\
DtypeError
tdc.compile.train_step: expected a state made by init, got NoneType
hint: state = step.init(net)""",
        )
        self.says(
            lambda: step(step.init(W), None),
            """\
DtypeError
tdc.compile.train_step: expected a batch, got None
hint: step(state, batch)""",
        )
        momentum = train_step(first, sgd(0.1, momentum=0.9), compile=False)
        self.says(
            lambda: step(momentum.init(W), X),
            """\
StructureError
tdc.optim.sgd: expected a state with keys step, got keys momentum, step
hint: make the state with init of the same optimiser""",
        )
        self.says(
            lambda: taken(first, accumulate=4),
            """\
ShapeError
tdc.compile.train_step: expected a batch of at least 4 rows, got 3
hint: accumulate=1, or larger batches""",
        )
        self.says(
            lambda: taken(first, TensorDict({"x": X}), accumulate=2),
            """\
ShapeError
tdc.compile.train_step: expected a batch with a first dim to split, got TensorDict []
hint: give the batch its batch_size, or accumulate=1""",
        )
        growing = Optimizer(sgd(0.1).init, lambda g, s, p: (p, s.set("more", s["step"])))
        step = train_step(first, growing, compile=False)
        self.says(
            lambda: step(step.init(W), X),
            """\
StructureError
tdc.compile.train_step: expected a new state of the same keys, got 1 that differ
at optimizer.more
hint: an optimizer's update keeps the keys of what its init made""",
        )

    def test_load_state_dict(self):
        step = train_step(first, sgd(0.1), compile=False)
        saved = {"params.w": torch.ones(3), "step": torch.tensor(0), "optimizer.mean.w": torch.ones(2)}
        self.says(
            lambda: step.load_state_dict(step.init(W), saved),
            """\
StructureError
tdc.compile.train_step.load_state_dict: expected entries of this state, got 3 entries that differ
at params.w: Tensor float32[3], wanted Tensor float32[2]
at optimizer.step: missing, wanted Tensor int64[]
at optimizer.mean.w: Tensor float32[2], not wanted
hint: load it into a state of the same step and module""",
        )

    def test_checkpoint(self):
        self.says(
            lambda: checkpoint(3),
            """\
DtypeError
tdc.compile.checkpoint: expected a function or a module, got int
hint: checkpoint(layer)(x)""",
        )
        self.says(
            lambda: checkpoint(torch.tanh, policy=3),
            """\
DtypeError
tdc.compile.checkpoint: expected a policy that is a function or operations, got int
hint: policy=[torch.ops.aten.mm]""",
        )
        self.says(
            lambda: checkpoint_blocks(torch.tanh, nn.Linear),
            """\
DtypeError
tdc.compile.checkpoint_blocks: expected a module, got builtin_function_or_method
hint: checkpoint_blocks(net, nn.TransformerEncoderLayer)""",
        )
        self.says(
            lambda: checkpoint_blocks(nn.Sequential(nn.Linear(2, 2)), (nn.ReLU, nn.GELU)),
            """\
StructureError
tdc.compile.checkpoint_blocks: expected a module with a ReLU or GELU, got one of Linear, Sequential
hint: name one of these""",
        )


def test_errors_under_compile_keep_their_text():
    step = train_step(lambda p, x: p["w"] * x, sgd(0.1), backend="eager")
    with pytest.raises(Exception, match=r"tdc\.compile\.train_step: expected a loss of one number"):
        step(step.init(W), X)
