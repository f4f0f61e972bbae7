"""Samples of `torch.stft` and `torch.istft`: waves (B, -1), spectra (B, F, -1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import Call, Draw, Layout, Sample, call

from tdc.core.rules import Rule
from tdc.testing.batches import Ragged

PLAIN = ("eager", "grad")


def alone(dims: tuple[int, ...]) -> Any:
    """Expect each example by itself, with its ragged dims at `dims`."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, *rest = args
        return Ragged([ref(row, *rest, **kwargs) for row in x.rows], dims)

    return want


def window(d: Draw, size: int) -> Any:
    return d.tensor(size, domain="constant")


def stft(rule: Rule) -> Iterator[Sample]:
    def waves(d: Draw, least: int, domain: str = "real") -> Ragged:
        return d.ragged("flat", domain, lengths=tuple([3 * n + least for n in d.lengths]))

    def plain(d: Draw) -> Call:
        return call(waves(d, 5), 8, 3, window=window(d, 8), return_complex=True)

    def framed(d: Draw) -> Call:
        more: dict[str, Any] = {"center": False, "normalized": True, "onesided": False, "return_complex": True}
        return call(waves(d, 9), 9, 4, 6, window(d, 6), **more)

    yield Sample("plain", plain, alone((2,)))
    yield Sample("framed", framed, alone((2,)), PLAIN)
    for mode, least in (("constant", 0), ("replicate", 1), ("circular", 4)):

        def padded(d: Draw, mode: str = mode, least: int = least) -> Call:
            return call(waves(d, least), 8, window=window(d, 8), pad_mode=mode, return_complex=True)

        yield Sample(mode, padded, alone((2,)), PLAIN)
    both = lambda d: call(waves(d, 5, "complex"), 7, 2, window=window(d, 7))  # noqa: E731
    yield Sample("complex", both, alone((2,)), PLAIN)


def istft(rule: Rule) -> Iterator[Sample]:
    def spectra(d: Draw, frequencies: int) -> Ragged:
        return d.ragged(Layout((frequencies,), ()), "complex", lengths=tuple([n + 2 for n in d.lengths]))

    def both(d: Draw) -> Call:
        return call(spectra(d, 9), 9, 2, 6, window(d, 6), normalized=True, return_complex=True)

    yield Sample("plain", lambda d: call(spectra(d, 5), 8, 3, window=window(d, 8)), alone((1,)))
    yield Sample("length", lambda d: call(spectra(d, 5), 8, 2, window=window(d, 8), length=5), alone((1,)), PLAIN)
    yield Sample("short", lambda d: call(spectra(d, 4), 7, 2, window=window(d, 7), length=3), alone((1,)), PLAIN)
    yield Sample("both sides", both, alone((1,)), PLAIN)


RAGGED = {"stft": stft, "istft": istft}
