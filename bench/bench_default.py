"""What does a training step of a stock transformer with default arguments cost, against padding?

    encoder    4 layers of `nn.TransformerEncoderLayer(256, 8, batch_first=True)`: dropout of 0.1, also of attention
               weights, ReLU, 2048 wide. B=32, longest 256, at occupancies of 20, 35 and 77 %
    memory     the most bytes alive in such a step at 20 %

`padded` is the same net on the rectangle with `src_key_padding_mask`. Forward, mean of squares of real positions and
backward to the weights, eagerly and as one graph by Inductor. Both draw their own dropout, so what they agree in is
checked with dropout off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tdc
from bench._timing import Call, Report, arguments, interleaved, ratio, spread
from bench.bench_nested import LONGEST, B, lengths_at
from tdc.compile import peak_bytes
from tdc.testing import forbid

D, HEADS, LAYERS = 256, 8, 4
LIMITS = {0.20: 0.45, 0.35: 0.60, 0.77: 0.95}
MEMORY = 0.35


def encoder(device: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, HEADS, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)


def steps(net: nn.Module, values: Tensor, lengths: list[int], compiled: bool) -> dict[str, Call]:
    """Training steps of both kinds, which return gradients."""
    x: Any = tdc.pack([*values.split(lengths)])
    data, real = x.to_padded().data, x.values.numel()
    hidden = torch.arange(data.shape[1], device=data.device) >= x.lengths[:, None]
    run: Any = torch.compile(net, fullgraph=True) if compiled else net
    weights = list(net.parameters())

    def ragged() -> Any:
        return torch.autograd.grad(run(x).values.square().mean(), weights)

    def padded() -> Any:
        out = run(data, src_key_padding_mask=hidden)
        return torch.autograd.grad(out.masked_fill(hidden[..., None], 0).square().sum() / real, weights)

    return {"padded": padded, "tdc": ragged}


def agree(net: nn.Module, calls: dict[str, Call]) -> None:
    """Both give the same gradients without dropout, and the ragged one pads nowhere.

    Raises:
        AssertionError: they do not.
    """
    net.eval()
    for a, b in zip(calls["padded"](), calls["tdc"](), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * max(1.0, a.abs().max().item()))
    net.train()
    with forbid():
        calls["tdc"]()


def measure(report: Report, occupancy: float) -> None:
    """Time at one occupancy, and at the lowest memory."""
    torch.manual_seed(0)
    lengths = lengths_at(occupancy)
    values = torch.randn(sum(lengths), D, device=report.device)
    report.note(f"{occupancy:.0%}: {sum(lengths)} of {B} x {LONGEST} positions are real")
    for mode in ("eager", "compiled"):
        torch.compiler.reset()
        net = encoder(report.device)
        agree(net, steps(net, values, lengths, compiled=False))
        calls = steps(net, values, lengths, mode == "compiled")
        for call in calls.values():
            call()
        label = f"{mode} training at {occupancy:.0%}"
        times = interleaved(calls, rounds=3 if report.quick else 9, device=report.device, count=1)
        sizes = {name: peak_bytes(call) for name, call in calls.items()} if occupancy == min(LIMITS) else {}
        report.row(label, times, "padded", **{f"MB {name}": round(size / 1e6, 1) for name, size in sizes.items()})
        report.limit(f"{label}: tdc to padded", ratio(times["tdc"], times["padded"]), LIMITS[occupancy])
        if sizes:
            report.limit(f"memory of {label}: tdc to padded", spread([sizes["tdc"] / sizes["padded"]]), MEMORY)


def main() -> None:
    args = arguments("bench_default")
    question = "What does a training step of a stock transformer with default arguments cost, against padding?"
    report = Report("bench_default", question, args.device, args.quick)
    for occupancy in LIMITS:
        measure(report, occupancy)
    report.write()


if __name__ == "__main__":
    main()
