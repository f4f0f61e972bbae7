"""`torch.stft` and `torch.istft` of waves of different lengths, each row as torch makes it alone.

    waves (B, -1)         torch.stft(waves, n_fft, window=w, return_complex=True)    -> (B, F, -1), frames are ragged
    spectra (B, F, -1)    torch.istft(spectra, n_fft, window=w)                      -> (B, -1)

Rows are padded with their own samples and cut into frames. The inverse adds up blocks of `hop_length` samples of
neighbouring frames. The number of frames is read from the lengths (a size that the graph does not know, under compile).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect, expect_number, shown
from tdc.core.asserts import require
from tdc.core.dynamo import is_zero
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, op_name
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.shape.lengths import MODES
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import Ragged, Results, data_of, is_ragged, ragged_sizes, with_data

LEAST = 1e-11  # a sum of squared windows that torch takes for 0


def stft(
    input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Results:  # fmt: skip
    """Waves (B, -1) to spectra of frames (B, F, -1)."""
    op: Op = torch.stft
    hop, wide = framing(op, input, 2, "waves (B, -1)", n_fft, hop_length, win_length, window)
    if align_to_window is not None:
        hint = "leave align_to_window out"
        raise UnsupportedError(message(op, "frames of n_fft samples", f"align_to_window={align_to_window}", hint=hint))
    is_complex = input.dtype.is_complex or wide.dtype.is_complex
    if return_complex is None and not is_complex:
        raise DtypeError(message(op, "return_complex of real waves", "none", hint="return_complex=True"))
    around = n_fft // 2 if center else 0
    check_waves(op, input, n_fft, around, pad_mode)
    frames: Any = (F.pad(input, (around, around), pad_mode) if around else input).unfold(1, n_fft, hop)
    data, norm = data_of(frames) * wide, "ortho" if normalized else "backward"
    if is_onesided(op, onesided, is_complex):
        found = transformed(torch.fft.rfft, data, n_fft, n_fft // 2 + 1, norm)
    else:
        found = transformed(torch.fft.fft, data, n_fft, n_fft, norm)
    out = with_data(frames, found).transpose(1, 2)
    return torch.view_as_real(out) if return_complex is False else out


def istft(
    input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, normalized: bool = False, onesided: bool | None = None, length: Any = None,
    return_complex: bool = False,
) -> Ragged:  # fmt: skip
    """Spectra of frames (B, F, -1) to waves (B, -1).

    Args:
        length: samples of each row: one number for all, or the `lengths` of a batch, which the method takes alone
            (`torch.istft` refuses tensors). Rows are cut, or zeros follow.
    """
    op: Op = torch.istft
    hop, wide = framing(op, input, 3, "spectra (B, F, -1)", n_fft, hop_length, win_length, window)
    if not input.dtype.is_complex:
        hint = "torch.stft(..., return_complex=True), or torch.view_as_complex(x)"
        raise DtypeError(message(op, "complex spectra", describe(input), hint=hint))
    if hop > (win_length or n_fft):
        hint = "with longer steps samples between frames are lost"
        raise ShapeError(message(op, "a hop_length of win_length at most", f"{hop}", hint=hint))
    if wide.dtype.is_complex and not return_complex:
        raise DtypeError(message(op, "return_complex=True for a complex window", "False", hint="return_complex=True"))
    onesided = is_onesided(op, input.shape[1] != n_fft if onesided is None else onesided, return_complex)
    if input.shape[1] != (n_fft // 2 + 1 if onesided else n_fft):
        expected = f"{n_fft // 2 + 1 if onesided else n_fft} frequencies of n_fft={n_fft}, onesided={onesided}"
        raise ShapeError(message(op, expected, f"{input.shape[1]}", hint="n_fft and onesided of the stft"))
    require((ragged_sizes(input) > 0).all(), message(op, "a frame or more in each row", "none", hint="drop such rows"))
    spectra: Any = input.transpose(1, 2)
    data, norm = data_of(spectra), "ortho" if normalized else "backward"
    run = torch.fft.ifft if return_complex else torch.fft.irfft
    frames = transformed(run, data if return_complex else data[..., : n_fft // 2 + 1], n_fft, n_fft, norm) * wide
    squares = wide.square().expand(frames.shape)
    waves, weights = [fitted(op, overlapped(with_data(spectra, t), n_fft, hop), n_fft, hop, center, length, fill)
                      for t, fill in ((frames, 0), (squares, 1))]  # fmt: skip
    heavy = data_of(weights).abs() >= LEAST
    text = message(op, "windows that overlap at every sample", "a sample without", hint="center=True, a longer window")
    require((heavy | ~weights.mask if isinstance(weights, MaskedBatch) else heavy).all(), text, ShapeError)
    return with_data(waves, data_of(waves) / torch.where(heavy, data_of(weights), 1))


def framing(
    op: Op, x: Any, ndim: int, what: str, n_fft: int, hop_length: int | None, win_length: int | None, window: Any
) -> tuple[int, Tensor]:  # fmt: skip
    """The step between frames, and the window with zeros around, (N,); an error for a batch or sizes that torch
    refuses."""
    if not is_ragged(x) or x.ndim != ndim or x._batch_dim or x.ragged_dims != (ndim - 1,):
        raise StructureError(message(op, what, describe(x), hint="batch first, and time last: x.transpose(1, 2)"))
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise DtypeError(message(op, "floating point or complex numbers", describe(x), hint="x.float()"))
    hop = n_fft // 4 if hop_length is None else hop_length
    wide = n_fft if win_length is None else win_length
    expect_number(op, n_fft, hop, wide, whole=True)
    if hop < 1 or not 0 < wide <= n_fft:
        expected, got = "hop_length > 0 and 0 < win_length <= n_fft", f"{hop}, {wide} and {n_fft}"
        raise ShapeError(message(op, expected, got, hint="n_fft=400, hop_length=160, win_length=400 for speech"))
    if window is None:
        window = data_of(x).real.new_ones(wide)
    expect(op_name(op), window, Tensor, of=" as window")
    if window.ndim != 1 or window.shape[0] != wide:
        hint = f"torch.hann_window({wide})"
        raise ShapeError(message(op, f"a window of win_length={wide} samples", describe(window), hint=hint))
    left = (n_fft - wide) // 2
    return hop, F.pad(window, (left, n_fft - wide - left))


def is_onesided(op: Op, onesided: bool | None, is_complex: bool) -> bool:
    """True if spectra have the first half of frequencies only; an error where the other half differs."""
    if onesided and is_complex:
        hint = "onesided=False"
        raise DtypeError(message(op, "all frequencies of complex waves or windows", "onesided=True", hint=hint))
    return not is_complex if onesided is None else onesided


def check_waves(op: Op, x: Any, n_fft: int, around: int, pad_mode: str) -> None:
    """Require rows as long as padding and a frame need."""
    if pad_mode not in MODES:
        raise UnsupportedError(message(op, f"a pad_mode of {', '.join(MODES)}", f"{pad_mode!r}", hint="'reflect'"))
    need = {"constant": 0, "reflect": around + 1, "replicate": 1, "circular": around}[pad_mode] if around else 0
    least = max(need, n_fft - 2 * around)
    hint = "pad_mode='constant', or drop short rows first" if around else "center=True, or drop short rows first"
    expected = f"rows of {shown(least)} samples or more for n_fft={shown(n_fft)}"
    require((ragged_sizes(x) >= least).all(), message(op, expected, "a shorter one", hint=hint), ShapeError)


def transformed(run: Op, x: Tensor, n_fft: int, size: int, norm: str) -> Tensor:
    """A transform of torch.fft along the last dim, which then has `size`; torch's own refuses no frames at all."""
    if is_zero(x.shape[0]):
        return run(x.new_zeros(1, *x.shape[1:]), n=n_fft, norm=norm)[:0].expand(*x.shape[:-1], size)
    found: Tensor = run(x, n=n_fft, norm=norm)
    return found


def overlapped(frames: Any, n_fft: int, hop: int) -> Any:
    """Frames (B, -1, N) as waves (B, -1), the sum of what overlaps."""
    count = -(-n_fft // hop)  # of blocks in a frame
    blocks = F.pad(frames, (0, count * hop - n_fft)).unflatten(2, (count, hop))
    parts: list[Any] = [F.pad(blocks[:, :, k], (0, 0, k, count - 1 - k)) for k in range(count)]
    total = sum([data_of(part) for part in parts[1:]], data_of(parts[0]))
    return F.pad(with_data(parts[0], total).flatten(1, 2), (0, n_fft - count * hop))


def fitted(op: Op, x: Any, n_fft: int, hop: int, center: bool, length: Any, fill: float) -> Any:
    """Waves without what `center` put around them, or with `length` samples; `fill` where there are no frames."""
    around = n_fft // 2 if center else 0
    if length is None:
        return F.pad(x, (-around, -around)) if around else x
    if not isinstance(length, Tensor):
        expect_number(op, length, whole=True)
        return F.pad(x, (-around, length), value=fill)[:, :length]
    text = message(op, "a length that frames reach", "a longer one", hint="x.lengths of the waves that stft had")
    x = F.pad(x, (-around, hop), value=fill)
    lengths = length.flatten()
    require((lengths <= ragged_sizes(x)[:, 0]).all(), text, ShapeError)
    return x[:, :lengths]


define(torch.stft, "stft", ragged=stft)
define(torch.istft, "stft", ragged=istft)
