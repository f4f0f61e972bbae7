"""What does a recogniser with CTC cost on waves of different lengths, against padding?

    ctc         log-mel spectra, two convolutions of 256 channels, letters, F.ctc_loss; forward and backward

32 waves of up to 4 seconds at 8 kHz, at occupancies of 20, 35 and 77 %. `padded` is what one writes for a rectangle,
whose spectra of last frames are not those of each wave alone. The limit, on tdc over `padded`, is occupancy + 0.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._occupancy import against_padding, at_occupancies
from bench._timing import Call, Report, own
from bench.bench_nested import B, lengths_at

SAMPLES, N_FFT, HOP, BANDS, WIDTH, LETTERS = 32000, 256, 128, 40, 256, 32
WINDOW = torch.hann_window(N_FFT)
Run = Callable[..., Any]


def make_net(device: str) -> nn.ModuleDict:
    return nn.ModuleDict({
        "bank": nn.Linear(N_FFT // 2 + 1, BANDS, bias=False),
        "body": nn.Sequential(
            nn.Conv1d(BANDS, WIDTH, 5, 1, 2), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 5, 2, 2), nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 5, 1, 2), nn.GELU(),
        ),
        "head": nn.Linear(WIDTH, LETTERS),
    }).to(device)  # fmt: skip


def log_probs(net: Any, waves: Any) -> Any:
    spectra = torch.stft(waves, N_FFT, HOP, window=WINDOW.to(waves.device), return_complex=True)
    bands = torch.log(net["bank"](spectra.abs().square().transpose(1, 2)).abs() + 1e-3)
    return net["head"](net["body"](bands.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)


def ragged_loss(net: Any, waves: Any, texts: Any) -> Any:
    ctc_loss: Any = F.ctc_loss
    return ctc_loss(log_probs(net, waves), texts, None, None)


def padded_loss(net: Any, waves: Tensor, texts: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    return F.ctc_loss(log_probs(net, waves).transpose(0, 1), texts, frames, labels)


def training(net: nn.ModuleDict, run: Run, given: tuple[Any, ...]) -> Call:
    leaves = list(net.parameters())
    return lambda: torch.autograd.grad(run(net, *given), leaves)


def measure(report: Report, occupancy: float) -> None:
    """The step at one occupancy, eagerly and compiled; torch compiles no padded loss, so that its net is compiled."""
    torch._dynamo.reset()
    net = make_net(report.device)
    lengths = lengths_at(occupancy, B, SAMPLES)
    waves = tdc.pack([torch.randn(max(n, 4 * N_FFT)) for n in lengths]).to(report.device)
    texts = tdc.pack([torch.randint(1, LETTERS, (max(n // 4000, 1),)) for n in lengths]).to(report.device)
    frames = (1 + waves.lengths // HOP + 1) // 2
    given = waves.to_padded().data, texts.to_padded().data, frames, texts.lengths
    calls = {
        "padded": training(net, padded_loss, given),
        "tdc": training(net, ragged_loss, (waves, texts)),
        "padded, compiled": training(net, torch.compile(own(padded_loss)), given),
        "tdc, compiled": training(net, torch.compile(own(ragged_loss), fullgraph=True), (waves, texts)),
    }
    against_padding(report, f"ctc, {occupancy:.0%}", calls, occupancy)


def main() -> None:
    question = "What does a recogniser with CTC cost on waves of different lengths, against padding?"
    at_occupancies("bench_speech", question, measure)


if __name__ == "__main__":
    main()
