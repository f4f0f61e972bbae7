"""What does checkpointing the layers of an encoder save, and what does it cost, against torch's own?

A training step of a stock encoder of 12 layers on ragged and on dense batches, with AdamW, compiled:

    torch            the module, `torch.utils.checkpoint` around each layer, `torch.optim.AdamW(foreach=True)`
    tdc              `train_step` of `checkpoint_blocks(net, nn.TransformerEncoderLayer)`, donating
    ... kept         the same two without checkpoints

Peak memory is of bytes beyond what was alive before the step. Limit: 1.05 times torch's with checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tdc
from bench._timing import Report, Spread, arguments, interleaved
from tdc import functional_call
from tdc.compile import checkpoint_blocks, peak_bytes, train_step
from tdc.optim import adamw

LAYERS, WIDTH, LIMIT = 12, 64, 1.05


class Encoder(nn.Module):
    """Stock layers, each under torch's checkpoint if it is asked for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList([make(WIDTH, 4, 4 * WIDTH, dropout, batch_first=True) for _ in range(LAYERS)])
        self.checkpointed = False

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def loss_of(out: Any) -> Tensor:
    return out.square().mean()


def torch_step(net: Encoder, checkpointed: bool) -> Callable[[Any], Tensor]:
    """A step as torch takes it."""
    net = copy.deepcopy(net)
    net.checkpointed = checkpointed
    optimizer, run = torch.optim.AdamW(net.parameters(), foreach=True), torch.compile(net, fullgraph=True)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(run(batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def tdc_step(net: Encoder, checkpointed: bool) -> Callable[[Any], Tensor]:
    """A step as one function."""
    own = checkpoint_blocks(net, nn.TransformerEncoderLayer) if checkpointed else net
    step = train_step(lambda params, batch: loss_of(functional_call(own, params, (batch,))), adamw(), donate=True)
    state = step.init(net)
    return lambda batch: step(state, batch)[1]["loss"]


def measure(report: Report, what: str, dropout: float, batch: Any) -> None:
    """One encoder on one batch."""
    torch.compiler.reset()
    net = Encoder(dropout).to(report.device)
    made = {"torch": torch_step, "tdc": tdc_step}
    steps = {f"{n}{'' if on else ' kept'}": make(net, on) for n, make in made.items() for on in (True, False)}
    losses = [step(batch) for step in steps.values()]
    if not dropout:
        torch.testing.assert_close(torch.stack(losses), losses[0].expand(len(losses)), rtol=1e-4, atol=1e-4)
    peaks = {name: peak_bytes(step, batch) for name, step in steps.items()}
    calls = {name: lambda step=step: step(batch) for name, step in steps.items()}
    times = interleaved(calls, rounds=5 if report.quick else 15, burst=0.2, device=report.device)
    report.row(what, times, "torch", **{f"MB {name}": round(peak / 1e6, 2) for name, peak in peaks.items()})
    share = peaks["tdc"] / peaks["torch"]
    report.limit(f"{what}: memory to torch's", Spread(share, share, share), LIMIT)


def main() -> None:
    args = arguments("bench_checkpoint")
    report = Report("bench_checkpoint", "What do checkpoints of layers save and cost?", args.device, args.quick)
    torch.manual_seed(0)
    rows = [torch.randn(n, WIDTH) for n in (64, 20, 48, 9, 33, 57, 12, 40)]
    dense = torch.randn(8, 64, WIDTH).to(args.device)
    for dropout in (0.0, 0.1):
        measure(report, f"dense, dropout {dropout}", dropout, dense)
    measure(report, "ragged, dropout 0.0", 0.0, tdc.pack(rows).to(args.device))
    report.write()


if __name__ == "__main__":
    main()
