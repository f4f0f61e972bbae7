"""Spectra of waves of different lengths, and the way back, equal those of each wave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tdc

WINDOW = torch.hann_window(8)


def drawn(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, dtype=dtype) for n in lengths]


def power(x: Any, **how: Any) -> Any:
    return torch.stft(x, 8, 3, window=WINDOW, return_complex=True, **how).abs().square()


def test_rows_come_back_with_their_lengths():
    """Frames do not say how long a wave was, so that its last samples need `length`."""
    rows = drawn((9, 40, 5, 16), torch.float64)
    window = WINDOW.double()
    x: Any
    for x in (tdc.pack(rows), tdc.pack(rows).to_padded(float("nan"))):
        spectra: Any = torch.stft(x, 8, 4, window=window, return_complex=True)
        assert_close(spectra.istft(8, 4, window=window, length=x.lengths).unbind(), rows)
        assert_close(torch.istft(spectra, 8, 4, window=window, length=5).unbind(), [row[:5] for row in rows])
        whole = torch.stft(x, 8, 4, window=window + 1, return_complex=True)
        for back, row in zip(torch.istft(whole, 8, 4, window=window + 1, length=50).unbind(), rows, strict=True):
            kept = len(row) - len(row) % 4 + 4
            assert_close(back[: len(row)], row)
            assert back.shape == (50,)
            assert not back[kept:].any()


def test_waves_without_samples():
    for x in (tdc.pack([torch.zeros(0), torch.ones(9)]), tdc.pack([torch.ones(9)])[:0]):
        for batch in (x, x.to_padded()):
            got = power(batch, pad_mode="constant")
            want = [power(row, pad_mode="constant") for row in x.unbind()]
            assert got.shape[:2] == (len(want), 5)
            assert_close(got.unbind(), want)


def test_half_precision_under_autocast():
    rows = [row.bfloat16() for row in drawn((9, 17))]
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(power(tdc.pack(rows)).unbind(), [power(row) for row in rows])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: torch.stft(x, 80, return_complex=True), tdc.ShapeError, "rows of 41 samples or more for n_fft=80"),
        (lambda x: torch.stft(x, 16, center=False, return_complex=True), tdc.ShapeError, "center=True, or drop short"),
        (lambda x: torch.stft(x, 8), tdc.DtypeError, "hint: return_complex=True"),
        (lambda x: torch.stft(x, 8, win_length=9, return_complex=True), tdc.ShapeError, "0 < win_length <= n_fft"),
        (lambda x: torch.stft(x, 8, 0, return_complex=True), tdc.ShapeError, "hop_length > 0"),
        (lambda x: torch.stft(x, 8, window=torch.ones(7), return_complex=True), tdc.ShapeError, r"hann_window\(8\)"),
        (lambda x: torch.stft(x, 8, pad_mode="edge", return_complex=True), tdc.UnsupportedError, "a pad_mode of"),
        (lambda x: torch.stft(x.long(), 8, return_complex=True), tdc.DtypeError, "floating point or complex"),
        (lambda x: torch.stft(x * 1j, 8, onesided=True), tdc.DtypeError, "hint: onesided=False"),
        (lambda x: torch.istft(x, 8), tdc.StructureError, r"spectra \(B, F, -1\)"),
        (lambda x: torch.istft(spectra(x), 10), tdc.ShapeError, "6 frequencies of n_fft=10"),
        (lambda x: torch.istft(spectra(x), 8, 9), tdc.ShapeError, "hop_length of win_length at most"),
        (lambda x: torch.istft(spectra(x).abs(), 8), tdc.DtypeError, "complex spectra"),
        (lambda x: torch.istft(spectra(x), 8, window=WINDOW, center=False), tdc.ShapeError, "overlap at every sample"),
        (lambda x: spectra(x).istft(8, length=torch.tensor([9, 99])), tdc.ShapeError, "a length that frames reach"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str):
    x = tdc.pack(drawn((9, 12)))
    for batch in (x, x.to_padded()):
        with pytest.raises(error, match=text):
            call(batch)


def spectra(x: Any) -> Any:
    return torch.stft(x, 8, window=WINDOW, return_complex=True)
