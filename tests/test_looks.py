"""What objects print as, and what `dir` lists of namespaces: one line that says what they are, public names."""

from __future__ import annotations

import re
import sys
from html import escape
from typing import Any

import pytest
import torch
from test_api import ROOMS, facade
from torch import Tensor, nn

import tdc
from tdc.compile import counted, train_step
from tdc.optim import adamw, chain, clip_by_global_norm, cosine, ema, master_weights, schedule_free_sgd, sgd

PACKED = tdc.pack([torch.ones(1), torch.ones(2)])
IMAGES = tdc.pack([torch.ones(2, 4), torch.ones(3, 1)], ragged_dim=(1, 2))
TD = tdc.TensorDict({"x": torch.ones(2), "n": {"y": torch.ones(2)}}, [2])


def sign(x: Tensor) -> Tensor:
    return x.sign()


def finished() -> Any:
    builder = TD.mutate()
    builder.finish()
    return builder


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
        (tdc.batch(sign), "batch(sign)"),
        (TD.at, "at of TensorDict [2]"),
        (TD.at[0, None], "at[0, None] of TensorDict [2]"),
        (TD.mutate(), "Builder(x, n)"),
        (finished(), "Builder(finished)"),
        (PACKED.structure, "Structure(batch_size=2, ragged_dims=(1,))"),
        (
            tdc.data.BucketSampler([3, 2, 1], 2, shuffle=False),
            "BucketSampler(examples=3, shuffle=False, seed=0, drop_last=False, even=True, batch_size=2, window=100, "
            "tokens=6)",
        ),
    ],
)  # fmt: skip
def test_one_line(x: object, text: str):
    assert repr(x) == text


@pytest.mark.parametrize("x", [PACKED, PACKED.to_padded(), tdc.pack([PACKED, PACKED]), PACKED.to("meta")])
def test_a_notebook_shows_the_text_of_ragged_batches(x: Any):
    assert x._repr_html_().startswith(f"<pre>{escape(repr(x))}</pre>")


@pytest.mark.parametrize(
    ("x", "said", "bars"),
    [
        (PACKED, "2 examples, 3 positions: 75%", [160.0, 320.0]),
        (PACKED.to_padded(), "2 examples, 3 positions: 75%", [160.0, 320.0]),
        (IMAGES, "2 examples, 11 positions: 46%", [213.3, 80]),
        (tdc.pack([torch.ones(n) for n in range(1000)]), "1000 examples, 499,500 positions: 50%", None),
    ],
)
def test_a_notebook_shows_how_full_a_batch_is(x: Any, said: str, bars: list[float] | None):
    page = x._repr_html_()
    assert page.count(f"{said} of a padded batch") == 2  # to read, and to hear
    drawn = [float(width) for width in re.findall('width="([0-9.]+)" height="5"', page)]
    assert len(drawn) == 64 if bars is None else drawn == bars


@pytest.mark.parametrize("x", [PACKED.to("meta"), PACKED[:0], tdc.pack([torch.ones(0)]), tdc.pack([PACKED, PACKED])])
def test_a_notebook_shows_no_picture_where_there_is_nothing_to_show(x: Any):
    assert "<svg" not in x._repr_html_()


def test_parameters_look_like_a_tensordict_in_a_notebook():
    params = tdc.nn.TensorDictParams(TD)
    assert params._repr_html_() == params.td._repr_html_()


@pytest.mark.parametrize("x", [TD, tdc.nn.TensorDictParams(TD), TD.mutate()])
def test_keys_are_completed(x: Any):
    assert x._ipython_key_completions_() == ["x", "n", ("n", "y")]


@pytest.mark.parametrize("space", ["tdc", *[f"tdc.{room}" for room in ROOMS]])
def test_dir_lists_what_is_public(space: str):
    assert dir(sys.modules[space]) == sorted({name for name in facade(space) if name[0] != "_"})
