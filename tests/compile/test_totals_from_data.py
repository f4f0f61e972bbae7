"""Steps whose totals are data, and operations behind them: one graph, forward and backward, and exported.

A step such as `x[:, 1:]` makes a batch whose total a graph does not know before it runs. What comes behind it may not
ask for that, nor for the longest example, nor for the number of examples where the step chooses them. Each step of one
table stands in front of each operation of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from versions import refused

import tdc
from tdc import NestedTensor
from tdc.compile import counted, export

D = 4
BATCHES = ((5, 4, 6, 8), (4, 7, 5))  # other lengths, and another number of examples
FEW = (2, 3, 1)  # of which steps leave little or nothing


def batch(lengths: tuple[int, ...]) -> NestedTensor:
    g = torch.Generator().manual_seed(len(lengths))
    shift = -9.0 if lengths == FEW else 0.0  # no mask is True
    return tdc.pack([torch.randn(n, D, generator=g) + shift for n in lengths]).requires_grad_()


def fixed(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def channels(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of batches `(B, C, -1)` as one of batches `(B, -1, C)`."""
    return lambda x: fn(x.transpose(1, 2)).transpose(1, 2)


# From a batch (B, -1, D) to another one, with a total that is data.
STEPS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[:, 1:], "steps": lambda x: x[:, ::2], "ragged mask": lambda x: x[x[:, :, 0] > -0.5],
    "truncate": lambda x: tdc.truncate(x, x.lengths - 1), "rows by a mask": lambda x: x[x.lengths > 4],
    "strided conv1d": channels(lambda x: F.conv1d(x, KERNEL, stride=2, padding=1)),
    "permuted rows": lambda x: x[x.lengths.argsort()], "cat of batches": lambda x: torch.cat([x, x[:, 1:]]),
    "diff": lambda x: x.diff(dim=1), "repeat_interleave": lambda x: x.repeat_interleave(x.lengths % 2 + 1, dim=0),
    "unfold": lambda x: x.unfold(1, 2, 2).sum(-1),
    "masked_select": lambda x: torch.masked_select(x, x > -0.5).unsqueeze(-1) * WEIGHT[0],
    "to_packed": lambda x: x.to_padded().to_packed(),
}  # fmt: skip

WEIGHT, KERNEL, PLANES = fixed(D, D), fixed(D, D, 2), fixed(2, 2, 3, 3)
NETS: dict[str, Any] = {
    "batch_norm": nn.BatchNorm1d(D), "gru": nn.GRU(D, 3, batch_first=True), "lstm": nn.LSTM(D, 3, batch_first=True),
    "attention": nn.MultiheadAttention(D, 2, batch_first=True),
    "encoder": nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
}  # fmt: skip

# From such a batch to a batch, a tensor, or several.
OPS: dict[str, Callable[[Any], Any]] = {
    "batch_norm": channels(NETS["batch_norm"]),
    "max": lambda x: x.max(1)[0],
    "amax": lambda x: x.amax(1),
    "median": lambda x: x.median(1)[0],
    "mode": lambda x: x.mode(1)[0],
    "conv1d": channels(lambda x: F.conv1d(x, KERNEL, padding=1)),
    "max_pool1d": channels(lambda x: F.max_pool1d(x, 2)),
    "avg_pool1d": channels(lambda x: F.avg_pool1d(x, 2, padding=1)),
    "adaptive_avg_pool1d": channels(lambda x: F.adaptive_avg_pool1d(x, 2)),
    "interpolate": channels(lambda x: F.interpolate(x, scale_factor=2.0)),
    "cdist": lambda x: torch.cdist(x, x[:, ::1] * 2),
    "cumsum": lambda x: x.cumsum(1),
    "to_padded": lambda x: x.to_padded().data,
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3),
    "attention with weights": lambda x: NETS["attention"](x, x, x),
    "encoder": NETS["encoder"],
    "matmul": lambda x: torch.matmul(x.double(), x.double().transpose(1, 2)),  # large, behind a sine
    "einsum": lambda x: torch.einsum("bld,ble->bde", x, x),
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(1, 1)[0],
    "layer_norm": lambda x: F.layer_norm(x, (D,)),
    "linear": lambda x: F.linear(x, WEIGHT),
    "gru": lambda x: NETS["gru"](x)[0],
    "lstm": lambda x: NETS["lstm"](x)[1],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "cross_entropy": lambda x: F.cross_entropy(x.transpose(1, 2), x.detach().argmax(-1)),
    "mean": lambda x: x.mean(1),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1),
    "index": lambda x: x[:, 0],
    "flip": lambda x: x.flip(1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
}


def pairs(fast: int, slow: int) -> list[Any]:
    """Each step with each operation: a few steps of every other operation are fast, some of each slow, others swept."""
    found = []
    for i, op in enumerate(OPS):
        for k, step in enumerate(STEPS):
            turn = (i + k) % len(STEPS)
            late = [pytest.mark.slow] if turn < fast + slow else [pytest.mark.sweep]
            marks = [] if turn < fast and i % 2 == 0 else late
            found.append(pytest.param(step, op, marks=marks, id=f"{step}, {op}"))
    return found


def numbers(out: Any) -> list[Tensor]:
    """All tensors of a result but bounds of lengths."""
    return [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor) and v.dtype != torch.uint8]


def run(fn: Callable[[Any], Any], x: NestedTensor) -> list[Tensor]:
    """Results and gradients; nothing of an error."""
    torch.manual_seed(0)
    try:
        found = numbers(fn(x))
    except (tdc.TdcError, RuntimeError):
        return []
    parts = [(v.sin() * torch.arange(v.numel()).view(v.shape).cos()).sum() for v in found if v.requires_grad]
    return [*found, *torch.autograd.grad(sum(parts, x.values.sum() * 0), x.values)]


def behind(step: str, op: str) -> Callable[[Any], Any]:
    return lambda x: OPS[op](STEPS[step](x))


def the_same_compiled(fn: Callable[[Any], Any], batches: list[Callable[[], NestedTensor]]) -> None:
    """One graph for all batches has the results, gradients and errors of eager calls."""
    f = counted(fn, backend="aot_eager")
    with torch._dynamo.config.patch(allow_rnn=True):
        for make in batches:
            torch.testing.assert_close(run(f, make()), run(fn, make()), equal_nan=True)
    assert f.counts.compiles == 1


def the_same_exported(fn: Callable[[Any], Any], batches: list[Callable[[], NestedTensor]]) -> None:
    with torch.no_grad():
        exported = export(fn, (batches[0](),))
        for make in batches:
            torch.testing.assert_close(numbers(exported(make())), numbers(fn(make())), equal_nan=True)


@pytest.mark.cases(0, 3)
@pytest.mark.parametrize(("step", "op"), pairs(fast=1, slow=2))
def test_compiled(step: str, op: str):
    the_same_compiled(behind(step, op), [partial(batch, lengths) for lengths in (*BATCHES, FEW)])


@pytest.mark.cases(0, 6)
@pytest.mark.parametrize(("step", "op"), pairs(fast=0, slow=2))
def test_exported(step: str, op: str):
    the_same_exported(behind(step, op), [partial(batch, lengths) for lengths in BATCHES])


# -- images


class Block(nn.Module):
    """Two convolutions, the first with a stride, beside one that skips them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after)
        self.second, self.last_norm = nn.Conv2d(after, after, 3, 1, 1), nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, 2)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.last_norm(self.second(y)) + self.skip(x))


def images(*sizes: tuple[int, int]) -> NestedTensor:
    g = torch.Generator().manual_seed(len(sizes))
    return tdc.pack([torch.randn(2, *size, generator=g) for size in sizes], ragged_dim=(2, 3)).requires_grad_()


IMAGES = [partial(images, (9, 12), (16, 8), (10, 10)), partial(images, (12, 9), (8, 8), (14, 10), (9, 9))]


def resnet() -> nn.Module:
    stem = nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, Block(4, 6), Block(6, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.sweep
def test_a_residual_network_of_images():
    net = resnet()
    the_same_compiled(net, IMAGES)
    the_same_exported(net.eval(), IMAGES)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("op", [
    lambda x: F.conv2d(x, PLANES), lambda x: F.avg_pool2d(x, 2), lambda x: F.unfold(x, 2),
    lambda x: x.max(3)[0], lambda x: x.softmax(2), lambda x: x.to_padded().data,
], ids=["conv2d", "avg_pool2d", "unfold", "max of lines", "softmax of lines", "to_padded"])  # fmt: skip
def test_images_by_a_mask(op: Callable[[Any], Any]):
    def fn(x: Any) -> Any:
        return op(x[x.sizes[:, 0] > 8][:, :, 1:, ::2])

    the_same_compiled(fn, IMAGES)
    the_same_exported(fn, IMAGES)


@pytest.mark.sweep
@pytest.mark.slow
def test_machine_code_of_no_rows():
    """Inductor reads in front of what it pads there (torch 2.13), which is nowhere where there are no rows."""
    fn = behind("rows by a mask", "to_padded")
    f = counted(fn)
    for lengths in (BATCHES[0], FEW):
        torch.testing.assert_close(run(f, batch(lengths)), run(fn, batch(lengths)))


def chosen(x: Any) -> Any:
    """A padded batch whose width a graph does not know."""
    return x[x.lengths > 2].to_padded()


LAYER = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
BEHIND: dict[str, Callable[[Any], Any]] = {
    "flip": lambda x: chosen(x).flip(1), "the last position": lambda x: chosen(x)[:, -1],
    "narrow": lambda x: chosen(x).narrow(1, -1, 1), "replicate": lambda x: F.pad(chosen(x), (0, 0, 1, 1), "replicate"),
    "normalize": lambda x: F.normalize(chosen(x), dim=1), "unfold": lambda x: chosen(x).unfold(1, 2, 1),
    "encoder": lambda x: LAYER(chosen(x)), "roll": lambda x: x[x.lengths > 2].roll(1, 2),
    "logsumexp": lambda x: x[x.lengths > 2].logsumexp((0, 1)),
    "the same choice twice": lambda x: x[x.lengths > 2] + x[x.lengths > 2],
    "quantiles": lambda x: x.quantile(torch.tensor([0.2, 0.7]), 2),
}  # fmt: skip


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", BEHIND)
def test_widths_that_are_data(name: str):
    fn = BEHIND[name]
    f = counted(fn, backend="eager")
    with refused("quantile", name == "quantiles"):
        for lengths in (*BATCHES, FEW):
            x = batch(lengths).detach()
            tdc.testing.assert_close(f(x), fn(x))
        assert f.counts.compiles == 1


def test_a_loss_where_the_width_is_data():
    def step(x: Any, labels: Any) -> Tensor:
        return F.cross_entropy(chosen(x), chosen(labels))

    f = counted(step, backend="eager")
    with refused("data-dependent"):
        for lengths in BATCHES:
            x = batch(lengths).detach()
            labels = x.with_values(x.values.argmax(1))
            torch.testing.assert_close(f(x, labels), step(x, labels))
        assert f.counts.compiles == 1
