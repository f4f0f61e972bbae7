"""What does one operation on a NestedTensor add to torch's on its packed values?

Eagerly and without autograd, on 17 x 8 numbers, where kernels take next to no time: dispatch, checks, the result's
structure. `tdc` is the operation on NestedTensors of one structure, `raw` the same on their values, with row ids or an
index computed beforehand where positions of an example meet. The limit is on what tdc takes beyond raw, in
microseconds, for operations that leave lengths alone. Others stand here for information, and so do two modules: a stock
encoder layer beside linears on packed values with one SDPA for each example, and a block of a ResNet of stock modules
beside the operator of convolutions. What these add has the Python of torch's own modules in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._nested_rows import by_layers, packed_attention
from bench._timing import Call, Report, arguments, interleaved, spread
from bench.bench_vision import Block
from tdc import NestedTensor, offsets_of, pack
from tdc.kernels.convolution import convolve

ADDS = 3.0  # microseconds
LENGTHS, D = [5, 2, 7, 3], 8
SIDES = [(5, 4), (2, 3), (7, 2), (3, 3)]
Operation = tuple[Call, Call]


def leaving_lengths(x: NestedTensor, y: NestedTensor) -> dict[str, Operation]:
    """Operations position by position: the limit is on these."""
    v, w, flags = x.values, y.values, x > 0
    weight, bias, one = torch.randn(D, D), torch.randn(D), torch.ones(D)
    return {
        "x + y": (lambda: x + y, lambda: v + w),
        "x * 2": (lambda: x * 2, lambda: v * 2),
        "x + bias": (lambda: x + bias, lambda: v + bias),
        "relu": (lambda: torch.relu(x), lambda: torch.relu(v)),
        "x > y": (lambda: x > y, lambda: v > w),
        "where": (lambda: torch.where(flags, x, y), lambda: torch.where(flags.values, v, w)),
        "to float64": (lambda: x.to(torch.float64), lambda: v.to(torch.float64)),
        "gelu": (lambda: F.gelu(x), lambda: F.gelu(v)),
        "linear": (lambda: F.linear(x, weight, bias), lambda: F.linear(v, weight, bias)),
        "layer_norm": (lambda: F.layer_norm(x, (D,), one, bias), lambda: F.layer_norm(v, (D,), one, bias)),
        "softmax of features": (lambda: x.softmax(-1), lambda: v.softmax(-1)),
        "sum of features": (lambda: x.sum(-1), lambda: v.sum(-1)),
        "cat of features": (lambda: torch.cat([x, y], -1), lambda: torch.cat([v, w], -1)),
        "unsqueeze": (lambda: x.unsqueeze(-1), lambda: v.unsqueeze(-1)),
    }


def along_positions(x: NestedTensor) -> dict[str, Operation]:
    """Operations along the ragged dim, or that change lengths: for information."""
    v, rows = x.values, len(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    ids, counts = torch.repeat_interleave(lengths), lengths[:, None]
    inner = torch.cat([part[1:] for part in torch.arange(sum(LENGTHS)).split(LENGTHS)])

    def total() -> Tensor:
        return v.new_zeros(rows, D).index_add_(0, ids, v)

    return {
        "sum of positions": (lambda: x.sum(1), total),
        "mean of positions": (lambda: x.mean(1), lambda: total() / counts),
        "x[:, 1:]": (lambda: x[:, 1:], lambda: v.index_select(0, inner)),
        "x[0]": (lambda: x[0], lambda: v[:5]),
        "transpose": (lambda: x.transpose(1, 2), lambda: v.transpose(0, 1)),
    }


def modules(x: NestedTensor) -> dict[str, Operation]:
    """Whole modules in inference, for information."""
    layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True).eval()
    net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    block, images = Block(D, D, 1, False).eval(), pack([torch.randn(D, *side) for side in SIDES], ragged_dim=(2, 3))
    first, norm, _, second, again = block.body
    rows, sizes, ones = images.values.t().contiguous(), images.sizes, [1, 1]

    def normed(y: Tensor, norm: Any) -> Tensor:
        return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias)

    def convolved(y: Tensor, conv: Any) -> Tensor:
        return convolve(y, conv.weight, None, None, sizes, rows.shape[0], ones, ones, ones, 1)

    def by_hand() -> Tensor:
        y = torch.relu(normed(convolved(rows, first), norm))
        return torch.relu(normed(convolved(y, second), again) + rows).t()

    def attend(attn: Any, y: Tensor) -> Tensor:
        return packed_attention(attn, y, LENGTHS)

    return {
        "encoder layer": (lambda: net(x), lambda: by_layers(net, x.values, attend)),
        "residual block": (lambda: block(images), by_hand),
    }


def agree(what: str, ours: Any, raw: Tensor) -> None:
    """Both give the same numbers.

    Raises:
        AssertionError: they do not.
    """
    found = ours.values if isinstance(ours, NestedTensor) else ours
    torch.testing.assert_close(found, raw, msg=lambda m: f"{what}: {m}")


def measure(report: Report, operations: dict[str, Operation], limited: bool) -> None:
    """Time that each adds, round by round."""
    rounds = 9 if report.quick else 61
    for what, (ours, raw) in operations.items():
        with torch.no_grad():
            agree(what, ours(), raw())
            times = interleaved({"tdc": ours, "raw": raw}, rounds=rounds, burst=0.004, device=report.device)
        added = spread([(a - b) * 1e6 for a, b in zip(times["tdc"], times["raw"], strict=True)])
        report.row(what, times, "raw", adds=f"{added.median:.2f} us")
        if limited:
            report.limit(f"{what}: tdc beyond raw", added, ADDS, unit="us")


def main() -> None:
    args = arguments("bench_operation")
    question = "What does one operation on a NestedTensor add to torch's on its packed values?"
    report = Report("bench_operation", question, args.device, args.quick)
    torch.manual_seed(0)
    offsets = offsets_of(torch.tensor(LENGTHS)).to(report.device)
    first = torch.randn(sum(LENGTHS), D, device=report.device)
    x = NestedTensor(first, offsets, max_length=max(LENGTHS))
    y = x.with_values(torch.randn_like(first))
    measure(report, leaving_lengths(x, y), True)
    measure(report, along_positions(x), False)
    measure(report, modules(x), False)
    report.write()


if __name__ == "__main__":
    main()
