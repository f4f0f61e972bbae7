"""Transforms of torchaudio on waves of different lengths: each row as it is alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc

transforms: Any = pytest.importorskip("torchaudio.transforms", exc_type=(ImportError, OSError))
pytestmark = pytest.mark.clients
MADE = {
    "power": lambda: transforms.Spectrogram(n_fft=400),
    "magnitude": lambda: transforms.Spectrogram(n_fft=400, power=1.0, normalized=True),
    "mel": lambda: transforms.MelSpectrogram(n_fft=400, hop_length=160, n_mels=40),
    "mfcc": lambda: transforms.MFCC(n_mfcc=13, melkwargs={"n_fft": 400, "n_mels": 40}),
    "decibel": lambda: torch.nn.Sequential(transforms.Spectrogram(n_fft=400), transforms.AmplitudeToDB("power")),
}


@pytest.mark.parametrize("name", MADE)
def test_each_row_is_as_it_is_alone(name: str):
    torch.manual_seed(0)
    module, x = MADE[name](), tdc.pack([torch.randn(n) for n in (900, 1600, 700)])
    batch: Any
    for batch in (x, x.to_padded(float("nan"))):
        assert_close(module(batch).unbind(), [module(row) for row in x.unbind()], rtol=1e-4, atol=1e-4)
