"""Sizes that a graph reads from data more than once: each symbol of a graph has a node that defines it.

torch merges equal operations of a graph for training, and keeps the symbols of both (`fx_graph_cse`, 2.11-2.15), so
that Inductor would meet a symbol without a definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import tdc
from tdc.compile import counted

internals: Any = torch
functional: Any = F  # whose types know tensors only
KERNEL, PLANE = [torch.randn(3, 2, *[3] * n, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]


def waves(k: int) -> Any:
    """Sequences (B, 2, -1)."""
    g = torch.Generator().manual_seed(k)
    return tdc.pack([torch.randn(2, 9 + i + k, generator=g) for i in range(3 + k)], ragged_dim=2)


def images(k: int) -> Any:
    """Images (B, 2, -1, 8)."""
    g = torch.Generator().manual_seed(k)
    return tdc.pack([torch.randn(2, 9 + i + k, 8, generator=g) for i in range(3 + k)], ragged_dim=2)


def unbounded(x: Any) -> Any:
    """The same sequences without a bound of their lengths."""
    return x.unfold(2, 2, 1).select(-1, 0)


def strided(x: Any) -> Any:
    return functional.conv1d(x, KERNEL[:, :1].expand(3, 3, 3), stride=2)


def spectrum(x: Any) -> Any:
    return torch.stft(x.select(1, 0), 4, 2, return_complex=True).abs()


# One function for both sides of a sum; each reads the same sizes.
READS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "strided conv1d": (waves, lambda x: F.conv1d(x, KERNEL, stride=2, padding=1)),
    "strided conv2d": (images, lambda x: F.conv2d(x, PLANE, stride=2, padding=1)),
    "transposed conv2d": (images, lambda x: F.conv_transpose2d(x, PLANE.transpose(0, 1), stride=2, padding=1)),
    "pooling": (images, lambda x: F.avg_pool2d(x, 3, 2)),
    "adaptive pooling": (waves, lambda x: F.adaptive_max_pool1d(x, 2)),
    "windows": (images, lambda x: x.unfold(2, 3, 2)),
    "spectra": (waves, spectrum),
    "blocks": (images, lambda x: F.unfold(x, 3, stride=2)),
    "interpolation": (waves, lambda x: F.interpolate(x, scale_factor=0.7)),
    "longest": (waves, lambda x: functional.conv1d(unbounded(x), KERNEL, padding=1).to_padded().data),
    "layers without a bound": (waves, lambda x: strided(functional.conv1d(unbounded(x), KERNEL)).to_padded().data),
    "slices": (waves, lambda x: x[:, :, 1::2]),
    "differences": (waves, lambda x: x.diff(dim=2)),
    "rows": (waves, lambda x: x[1]),
    "padded rows": (waves, lambda x: x.to_padded()[1]),
    "to_packed": (waves, lambda x: x.to_padded().to_packed()),
}  # fmt: skip


def twice(read: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A loss of two branches."""

    def loss(x: Any, scale: Tensor) -> Tensor:
        parts = [read(x * scale), read(x * scale.exp())]
        return sum([(p if isinstance(p, Tensor) else p.values).square().mean() for p in parts], scale * 0)

    return loss


def undefined(graph: torch.fx.GraphModule) -> set[Any]:
    """Symbols of data-dependent sizes that no number of a graph is, as it is handed to Inductor."""
    used, made = set[Any](), set[Any]()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        used |= free_unbacked_symbols(value) if isinstance(value, (Tensor, torch.SymInt)) else set()
        made |= {value.node.expr} if isinstance(value, torch.SymInt) else set()
    return used - made if any([n.target is torch.ops.aten.sym_size.int for n in graph.graph.nodes]) else set()


FAST = ("slices", "strided conv1d")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in READS]  # seconds each


@pytest.mark.parametrize("name", CASES)
def test_each_size_is_defined(name: str):
    make, read = READS[name]
    missing: list[set[Any]] = []

    def check(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        missing.append(undefined(graph))
        return internals._functorch.aot_autograd.make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=check, partition_fn=min_cut_rematerialization_partition)
    f, scale = counted(twice(read), backend=backend), torch.tensor(0.7, requires_grad=True)
    for k in range(3):
        found, expected = [run(make(k), scale) for run in (f, twice(read))]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*[torch.autograd.grad(t, scale) for t in (found, expected)])
    assert f.counts.compiles == 1
    assert missing[0] == set()


# -- by Inductor

BANK, WINDOW = torch.randn(9, 4, generator=torch.Generator().manual_seed(9)), torch.hann_window(16)


class Recognizer(nn.Module):
    """Waves (B, -1) to log-probabilities (B, -1, 5); its layers read the longest wave more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(4, 6, 5, 1, 2), nn.GELU(), nn.Conv1d(6, 6, 5, 2, 2), nn.GELU())
        self.head = nn.Linear(6, 5)

    def forward(self, waves: Any) -> Any:
        spectra = torch.stft(waves, 16, 8, window=WINDOW, return_complex=True)
        bands = torch.log(spectra.abs().square().transpose(1, 2) @ BANK.abs() + 1e-3)
        return self.head(self.body(bands.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)


@pytest.mark.slow  # machine code, forward and backward
@pytest.mark.filterwarnings("ignore:Torchinductor does not support")  # complex numbers, which it hands on
def test_a_loss_of_waves():
    def loss(waves: Any, texts: Any) -> Tensor:
        return functional.ctc_loss(net(waves), texts, None, None)

    torch.manual_seed(0)
    net = Recognizer()
    f, leaves = counted(loss), list(net.parameters())
    for k in range(3):
        waves = tdc.pack([torch.randn(80 + 30 * i + k) for i in range(3 + k)])
        texts = tdc.pack([torch.randint(1, 5, (1 + i,)) for i in range(3 + k)])
        found, expected = [torch.autograd.grad(run(waves, texts), leaves) for run in (f, loss)]
        torch.testing.assert_close(found, expected)
    assert f.counts.compiles == 1


@pytest.mark.slow  # machine code, forward and backward
@pytest.mark.parametrize(("name", "backend"), [
    ("strided conv2d", "inductor"), ("strided conv2d", tdc.compile.backend), ("rows", "inductor"),
    ("padded rows", "inductor"),
], ids=["strided", "strided, ours", "rows", "padded rows"])  # fmt: skip
def test_machine_code(name: str, backend: Any):
    make, read = READS[name]
    f, scale = counted(twice(read), backend=backend), torch.tensor(0.7, requires_grad=True)
    for k in range(3):
        found, expected = [torch.autograd.grad(run(make(k), scale), scale) for run in (f, twice(read))]
        torch.testing.assert_close(found, expected)
    assert f.counts.compiles == 1
