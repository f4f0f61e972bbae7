"""What objects print as, and what `dir` lists of namespaces: one line that says what they are, public names."""

from __future__ import annotations

import sys

import pytest
import torch
from test_api import ROOMS, facade
from torch import Tensor, nn

import tdc
from tdc.compile import counted, train_step
from tdc.optim import adamw, chain, clip_by_global_norm, cosine, ema, master_weights, schedule_free_sgd, sgd


def mean(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).mean()


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (sgd(0.1), "Optimizer(sgd(lr=0.1))"),
        (adamw(cosine(3e-4, steps=10)), "Optimizer(adamw(lr=cosine))"),
        (clip_by_global_norm(1.0), "Transform(clip_by_global_norm)"),
        (
            chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.9)),
            "Optimizer(chain(clip_by_global_norm, adamw(lr=0.001), ema))",
        ),
        (ema(0.9), "Transform(ema)"),
        (master_weights(sgd(0.1)), "Optimizer(master_weights(sgd(lr=0.1)))"),
        (schedule_free_sgd(0.1), "Optimizer(schedule_free_sgd(lr=0.1))"),
        (
            train_step(nn.Linear(2, 1), mean, sgd(0.1)),
            "TrainStep(net=Linear, loss=mean, optimizer=sgd(lr=0.1), compiled)",
        ),
        (
            train_step(mean, sgd(0.1), compile=False),
            "TrainStep(loss=mean, optimizer=sgd(lr=0.1), not compiled)",
        ),
        (
            train_step(nn.Linear(2, 1), mean, sgd(0.1)).eval(),
            "Evaluation(net=Linear, loss=mean, optimizer=sgd(lr=0.1))",
        ),
        (counted(mean, backend="eager"), "counted(mean, graphs=0, breaks=0, compiles=0)"),
        (tdc.lanes(torch.ones(2)), "lanes(Tensor float32[2])"),
    ],
)  # fmt: skip
def test_one_line(x: object, text: str):
    assert repr(x) == text


@pytest.mark.parametrize("space", ["tdc", *[f"tdc.{room}" for room in ROOMS]])
def test_dir_lists_what_is_public(space: str):
    assert dir(sys.modules[space]) == sorted({name for name in facade(space) if name[0] != "_"})
