"""Speech recognition in small: waves of different lengths to letters, by CTC, in one compiled graph.

    python examples/speech.py

A letter is a tone of its own pitch, which lasts as long as it likes; a text is a row of tones with noise. The net takes
raw waves: spectra, bands, convolutions, letters. Spectra of each wave end where it ends, so that no padding is
computed, and F.ctc_loss takes the lengths from the batches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import train_step
from tdc.optim import adamw, chain, clip_by_global_norm, cosine

RATE, N_FFT, HOP, BANDS, LETTERS, STEPS = 8000, 256, 128, 20, 6, 60
PITCHES = torch.linspace(300, 1800, LETTERS)


def filter_bank(bands: int, n_fft: int, rate: int) -> Tensor:
    """Triangles that are even on the mel scale, (F, M)."""
    most = 2595 * torch.log10(torch.tensor(1 + rate / 1400))
    edges = 700 * (10 ** (torch.linspace(0, 1, bands + 2) * most / 2595) - 1)
    bins = torch.linspace(0, rate / 2, n_fft // 2 + 1)[:, None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


class Recognizer(nn.Module):
    """Waves (B, -1) to the log-probabilities (B, -1, 1 + LETTERS) of a blank and the letters at each frame."""

    window: Tensor
    bank: Tensor

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.register_buffer("bank", filter_bank(BANDS, N_FFT, RATE))
        self.body = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU()
        )
        self.head = nn.Linear(width, 1 + LETTERS)

    def forward(self, waves: Any) -> Any:
        spectra = torch.stft(waves, N_FFT, HOP, window=self.window, return_complex=True)  # (B, F, -1)
        power = spectra.abs().square().transpose(1, 2)
        bands = torch.log(power @ self.bank + 1e-3)
        return self.head(self.body(bands.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)


def spoken(text: Tensor, generator: torch.Generator) -> Tensor:
    """A wave of tones, each as long as it likes."""
    lengths = torch.randint(700, 1500, (len(text),), generator=generator)
    pitch = PITCHES[text - 1].repeat_interleave(lengths)
    wave = torch.sin(2 * torch.pi * (pitch / RATE).cumsum(0)) * (torch.rand((), generator=generator) + 0.5)
    return wave + 0.1 * torch.randn(len(wave), generator=generator)


def draw(generator: torch.Generator) -> TensorDict:
    """A batch of 12 to 20 texts of one to five letters, no two neighbours alike, and their waves."""
    count = int(torch.randint(12, 21, (), generator=generator))
    steps = [torch.randint(1, LETTERS, (int(n),), generator=generator)
             for n in torch.randint(1, 6, (count,), generator=generator)]  # fmt: skip
    texts = [step.cumsum(0) % LETTERS + 1 for step in steps]
    waves = [spoken(text, generator) for text in texts]
    return TensorDict({"waves": tdc.pack(waves), "texts": tdc.pack(texts)}, [count])


def loss(net: Recognizer, batch: TensorDict) -> Tensor:
    ctc_loss: Any = F.ctc_loss
    return ctc_loss(net(batch["waves"]), batch["texts"], None, None)


def read(log_probs: Any) -> list[list[int]]:
    """The most likely letter of each frame, without repetitions and blanks."""
    return [[n for n in torch.unique_consecutive(row).tolist() if n] for row in log_probs.argmax(-1).unbind()]


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = Recognizer()
    step = train_step(net, loss, chain(clip_by_global_norm(1.0), adamw(cosine(5e-3, STEPS, warmup=10))), donate=True)
    state = step.init(seed=0)
    for i in range(STEPS):
        state, metrics = step(state, draw(generator))
        if i % 15 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {metrics['loss']:.3f}")
    step.load_into(net, state)
    test = draw(generator)
    with torch.no_grad():
        found = read(net(test["waves"]))
        alone = [read(net(wave[None]))[0] for wave in test["waves"].unbind()]
    right = sum([a == b for a, b in zip(found, test["texts"].tolist(), strict=True)])
    print(f"{right} of {len(found)} texts right, the same for each wave alone: {found == alone}")
    counts = step.counts
    print(f"graphs {counts.graphs}, breaks {counts.breaks}, compiles {counts.compiles}")
    assert right > 0.8 * len(found), "it has not learned"


if __name__ == "__main__":
    main()
