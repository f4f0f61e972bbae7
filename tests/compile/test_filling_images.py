"""`buckets=` of images: convolution, pooling and norms of packed planes and of rectangles, and a residual network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filled_batches import compared, poison
from torch import Tensor, nn
from versions import OLD

import tdc
from tdc.compile import Buckets, counted, train_step
from tdc.optim import sgd
from tdc.testing import assert_close

SIDES = (((9, 12), (17, 8)), ((11, 10), (8, 15)), ((16, 9), (10, 13)))
GIVEN = Buckets(rows=(3,), totals=(256, 512, 1024), lengths=(20,))


def images(*sides: tuple[int, int]) -> tdc.NestedTensor:
    return tdc.pack([torch.randn(3, *side) for side in sides], ragged_dim=(2, 3))


def padded(x: Any) -> Any:
    return x.to_padded()


W, DEPTHWISE = torch.randn(4, 3, 3, 3), torch.randn(3, 1, 3, 3)
FUNCTIONS: dict[str, Any] = {
    "conv": lambda x: F.conv2d(x, W, padding=1),
    "strided": lambda x: F.conv2d(x, W, stride=2, padding=1),
    "padded widely": lambda x: F.conv2d(x, W, padding=3),
    "depthwise": lambda x: F.conv2d(x, DEPTHWISE, stride=2, groups=3),
    "dilated": lambda x: F.conv2d(x, W, dilation=2),
    "one position": lambda x: F.conv2d(x, W[:, :, :1, :1], stride=2),
    "transposed": lambda x: F.conv_transpose2d(x, W.transpose(0, 1), stride=2),
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max, rounded up": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean of counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "global": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 3),
    "instance norm": lambda x: F.instance_norm(x),
}  # fmt: skip


@pytest.mark.cases(3, 8)
@pytest.mark.parametrize("way", [lambda x: x, padded], ids=["packed", "padded"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_images(name: str, way: Any, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch)
    batches = [images(*sides) for sides in SIDES]
    run = compared(lambda x: FUNCTIONS[name](way(x)), *batches, atol=1e-5, buckets=GIVEN)
    assert run.counts.compiles == 1


PLANES: dict[str, Any] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "conv": lambda x: F.conv2d(x, W, padding=1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: F.group_norm(x, 3),
    "max in three dims": lambda x: F.max_pool3d(x.unsqueeze(2).expand(-1, -1, 2, -1, -1), 2, return_indices=True),
}


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", PLANES)
def test_gradients_of_rectangles(name: str, monkeypatch: pytest.MonkeyPatch):
    """Filled sides of a dense rectangle."""
    poison(monkeypatch)
    def loss(x: Any) -> Tensor:
        out = PLANES[name](x.to_padded().data.sin())
        first = out[0] if isinstance(out, tuple) else out
        rest = out[1].double().mean() if isinstance(out, tuple) else 0
        return first.pow(3).mean() + rest

    run = counted(loss, backend="aot_eager", buckets=GIVEN)
    for sides in SIDES:
        x = images(*sides)
        x.values.requires_grad_()
        want, got = loss(x), run(x)
        assert_close(got, want, rtol=1e-5, atol=1e-6)
        grads = [torch.autograd.grad(y, x.values)[0] for y in (got, want)]
        assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)
    assert run.counts.compiles == (3 if OLD and name == "max in three dims" else 1)  # guards of torch 2.11


class Block(nn.Module):
    """Two convolutions beside one of one position."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.side = nn.Sequential(nn.Conv2d(channels, out, 1, 2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.side(x))


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Block(8, 16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def loss(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["label"])


@pytest.mark.parametrize("way", [lambda x: x, padded], ids=["packed", "padded"])
@pytest.mark.slow  # traces of a whole network, forward and backward
def test_a_residual_network(way: Any):
    torch.manual_seed(0)
    net = resnet().double()
    plain = train_step(net, loss, sgd(0.1), compile=False)
    step = train_step(net, loss, sgd(0.1), backend="eager", buckets=GIVEN)
    a, b = plain.init(), step.init()
    judge, expected = step.eval(), plain.eval()
    for sides in SIDES:
        x = tdc.pack([torch.randn(3, *side).double() for side in sides], ragged_dim=(2, 3))
        batch = tdc.TensorDict({"x": way(x), "label": torch.arange(2)}, [2])
        (a, _), (b, _) = plain(a, batch), step(b, batch)
        assert_close(b, a, rtol=1e-6, atol=1e-9)
        assert_close(judge(b, batch), expected(a, batch), rtol=1e-6, atol=1e-9)
    assert (step.counts.compiles, judge.counts.compiles) == (1, 1)
