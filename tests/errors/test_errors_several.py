"""What a newcomer types wrong on a batch with several ragged dims, message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tdc
from tdc.core.errors import TdcError

IMAGES = [torch.zeros(3, 4, 5), torch.zeros(3, 6, 3)]


def x() -> Any:
    return tdc.pack(IMAGES, ragged_dim=(2, 3))


def lines() -> Any:
    return tdc.pack([torch.zeros(3, 5), torch.zeros(3, 4)], ragged_dim=2)


DIM = "expected one dim, got {}\nhint: name one dim, e.g. dim=-1"
NEIGHBOURS = "hint: dim 0 is the batch; permute the rows so that ragged dims are neighbours"
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no ragged dim": (
        lambda: tdc.pack(IMAGES, ragged_dim=()),
        f"pack: expected neighbouring ragged dims in [1, 3], got ()\n{NEIGHBOURS}",
    ),
    "a dim left out": (
        lambda: tdc.pack(IMAGES, ragged_dim=2),
        "pack: expected rows like the first, Tensor float32[3, 4, 5], that differ in dim 1 only, got 1 others\n"
        "at row 1: Tensor float32[3, 6, 3]\n"
        "hint: name the dims that differ with ragged_dim=, the batch counting as dim 0",
    ),
    "a name": (lambda: x().sort("height"), "sort: " + DIM.format("height")),
    "two dims to sort": (lambda: x().sort((2, 3)), "sort: " + DIM.format("(2, 3)")),
    "two dims of a softmax": (lambda: x().softmax((2, 3)), "softmax: " + DIM.format("(2, 3)")),
    "two dims of a scan": (lambda: x().cumsum((2, 3)), "cumsum: " + DIM.format("(2, 3)")),
    "a dim too many": (
        lambda: x().sort(4),
        "sort: expected a dim in [-4, 3], got 4\nhint: count dims of the logical shape",
    ),
    "fewer than none": (
        lambda: x().topk(-1, 2),
        "topk: expected k of 0 or more, got -1\nhint: k = 1 is the largest element",
    ),
    "a roll of all": (
        lambda: x().roll(1),
        "roll: expected dims to roll along, got none: elements would move from example to example\n"
        "hint: name them, e.g. x.roll(1, 1)",
    ),
    "sequences and images": (
        lambda: x() + lines(),
        "add: expected batches whose dims meet, counted from the last, got other numbers of dims\n"
        "at operand 0: NestedTensor float32[2, 3, -1, -1]\n"
        "at operand 1: NestedTensor float32[2, 3, -1]\n"
        "hint: y.unsqueeze(d) where y lacks a dim of x",
    ),
    "a mask of sequences": (
        lambda: x()[lines() > 0],
        "index: expected a mask with the first dims of NestedTensor float32[2, 3, -1, -1], "
        "got NestedTensor bool[2, 3, -1]\n"
        "hint: mask.expand(...), or x.transpose(a, b)",
    ),
    "other heights": (
        lambda: torch.cat([x(), x()[:, :, 1:]], 3),
        "cat: expected rows that differ in the dim they are joined along only, got others\nhint: F.pad or crop them",
    ),
    "a dim between": (
        lambda: x().permute(0, 2, 1, 3),
        "permute: expected several ragged dims side by side, got ragged dims (2, 3) at [1, 3]\n"
        "hint: x.to_padded() first",
    ),
    "repeated lines": (
        lambda: x().repeat_interleave(2, 2),
        "repeat_interleave: expected the only ragged dim, got dim 2, one of 2\n"
        "hint: F.interpolate scales images; or loop over x.unbind()",
    ),
    "two vectors": (
        lambda: x()[:, :, [0, 1], [0, 1]],
        "index: expected at most one vector, got vectors at dims [2, 3]\n"
        "hint: one vector at a time: x[rows][..., positions]; rows pair only with positions of the ragged dim",
    ),
    "a layer for sequences": (
        lambda: F.conv1d(x(), torch.zeros(4, 3, 3)),
        "conv1d: expected (B, C, -1), 1 dim behind channels, got NestedTensor float32[2, 3, -1, -1], ragged dims (2, 3)"
        "\nhint: x.transpose(1, 2) puts features of sequences first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_it_says(name: str):
    call, text = WRONG[name]
    with pytest.raises(TdcError) as error:
        call()
    assert str(error.value) == "tdc." + text


def test_the_same_dims_of_padded_rows():
    padded = x().to_padded()
    for call in (lambda: padded.sort("height"), lambda: padded.softmax((2, 3)), lambda: padded.topk(-1, 2)):
        with pytest.raises(TdcError, match=r"tdc\.(sort|softmax|topk): expected (one dim|k of 0)"):
            call()
    with pytest.raises(TdcError, match=r"tdc\.roll: expected dims to roll along"):
        padded.roll(1)
