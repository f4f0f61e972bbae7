"""Images as views: the same as by a gather, or by lines, for every operation, with all derivatives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from versions import refused

import tdc
from tdc.ragged import views

SIZES = [(3, 4), (0, 2), (5, 1), (2, 0), (4, 4)]
MOVES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda x: x[:, :, 1:-1, -3:],
    "lines": lambda x: x[:, :, 1:],
    "steps": lambda x: x[:, :, ::2, 1::3],
    "turned": lambda x: x[:, :, ::-1, -2::-1],
    "turned by steps": lambda x: x[:, :, ::-2, :3],
    "ends of rows": lambda x: tdc.truncate(x, torch.tensor([1, 2, 3, 4, 2])),
    "mirrored": lambda x: x.flip(3),
    "mirrored twice": lambda x: x.flip(2, 3),
    "turned round": lambda x: x.transpose(2, 3),
    "rolled": lambda x: x.roll((1, -2), (3, 2)),
    "columns sorted": lambda x: x.sort(2).values,
    "lines sorted": lambda x: x.sort(-1, descending=True, stable=True).values,
    "order of lines": lambda x: x * x.argsort(3),
    "columns summed": lambda x: x.sum(2),
    "scan of lines": lambda x: x.cumsum(3),
    "scan of columns": lambda x: x.cummax(2).values,
    "positions of a scan": lambda x: x * x.cummin(3).indices,
    "differences": lambda x: x.diff(dim=2),
    "second differences": lambda x: x.diff(2, dim=3),
    "softmax of columns": lambda x: x.softmax(2),
    "log-softmax of lines": lambda x: x.float().log_softmax(3, dtype=torch.float64),
    "lines of norm 1": lambda x: torch.nn.functional.normalize(x, dim=3),
}
REDUCTIONS: dict[str, Callable[[Any], Any]] = {  # of images that have elements
    "sum of lines": lambda x: x.sum(3),
    "mean of columns, kept": lambda x: x.mean(2, keepdim=True),
    "largest of lines, kept": lambda x: x.amax(3, keepdim=True),
    "largest of columns and channels": lambda x: x.amax((1, 2)),
    "lines and channels": lambda x: x.logsumexp((1, 3), keepdim=True),
    "largest with positions": lambda x: x.max(3).values + x.max(3, keepdim=True).indices.squeeze(3),
    "positions": lambda x: x.argmin(2) * x.sum(2),
    "both ends": lambda x: torch.sub(*torch.aminmax(x, dim=3)),
    "medians": lambda x: x.median(2).values,
    "deviation": lambda x: x.std(3, correction=0),
    "norms": lambda x: torch.linalg.vector_norm(x, 3, dim=2),
    "every one": lambda x: (x > -9).all(3).double() * x.sum(3),
}


def images(dtype: torch.dtype = torch.float64, sizes: Any = SIZES) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, h, w, generator=generator, dtype=dtype) for h, w in sizes]
    return tdc.pack(rows, ragged_dim=(2, 3))


def both(monkeypatch: pytest.MonkeyPatch, fn: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives by a gather and by views, which it then takes."""
    gathered = fn()
    calls: list[int] = []
    monkeypatch.setattr(views, "LEAST", 1)
    for name in ("views", "strided"):
        run = getattr(views, name)
        monkeypatch.setattr(views, name, lambda *args, run=run: calls.append(1) or run(*args))
    found = fn()
    assert calls
    return gathered, found


@pytest.mark.parametrize("name", [*MOVES, *REDUCTIONS])
def test_values_and_derivatives(monkeypatch: pytest.MonkeyPatch, name: str):
    def run() -> list[Tensor]:
        x = (images() if name in MOVES else images(sizes=[(3, 4), (5, 1), (1, 1), (4, 4)])).requires_grad_()
        y = (MOVES | REDUCTIONS)[name](x)
        tdc.validate(y)
        (grad,) = torch.autograd.grad((y.values**3).sum(), x.values, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x.values)
        return [y.values, y.sizes if hasattr(y, "sizes") else y.lengths, grad, second]

    with refused("derivative for aten::aminmax is not implemented", name == "both ends"):
        for a, b in zip(*both(monkeypatch, run), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_beside_an_empty_image(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(views, "LEAST", 1)
    x = images(sizes=[(3, 4), (0, 3), (2, 0), (2, 2)])
    found, rows = REDUCTIONS[name](x).unbind(), x.unbind()
    for b in (0, 3):
        (alone,) = REDUCTIONS[name](tdc.pack([rows[b]], ragged_dim=(2, 3))).unbind()
        torch.testing.assert_close(found[b], alone)


@pytest.mark.parametrize("name", ["crop", "mirrored", "turned round"])
def test_in_a_direction(monkeypatch: pytest.MonkeyPatch, name: str):
    def run() -> Any:
        x = images()
        with fwd.dual_level():
            y = MOVES[name](x.with_values(fwd.make_dual(x.values, x.values.cos())))
            return fwd.unpack_dual(y.values).tangent

    torch.testing.assert_close(*both(monkeypatch, run))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64, torch.bfloat16])
def test_dtypes_and_channels_behind(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    rows = [torch.arange(h * w * 3).view(h, w, 3).to(dtype) for h, w in SIZES]
    x = tdc.pack(rows, ragged_dim=(1, 2))
    a, b = both(monkeypatch, lambda: x[:, 1:, ::-1].flip(1).transpose(1, 2))
    assert torch.equal(a.values, b.values)
    assert a.tolist() == b.tolist()


def test_graphs_and_transforms_gather(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "LEAST", 1)
    monkeypatch.setattr(views, "views", None)
    monkeypatch.setattr(views, "strided", None)
    x = images()
    with pytest.raises(TypeError):
        x.flip(3)
    torch.compile(lambda x: x.flip(3), backend="eager", fullgraph=True)(x)
    tdc.vmap(lambda v: x.with_values(v).flip(3).values)(x.values[None])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert not views.by_views(x)


@pytest.mark.parametrize("name", MOVES)
def test_gradients_of_several_at_once(monkeypatch: pytest.MonkeyPatch, name: str):
    """The backward of a call that went by views runs under `vmap` then."""
    monkeypatch.setattr(views, "LEAST", 1)
    x = images().requires_grad_()
    y = MOVES[name](x).values
    both = torch.randn(2, *y.shape, dtype=y.dtype)
    (got,) = torch.autograd.grad(y, x.values, both, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(y, x.values, one, retain_graph=True)[0] for one in both]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("step", [sys.maxsize, -sys.maxsize, 2**70])
def test_steps_of_any_size(monkeypatch: pytest.MonkeyPatch, step: int):
    monkeypatch.setattr(views, "LEAST", 1)
    x = images()
    for found, row in zip(x[:, :, ::step].unbind(), x.unbind(), strict=True):
        assert torch.equal(found, row[:, :1] if step > 0 else row[:, -1:])


@pytest.mark.parametrize("step", [1.5, "a"])
def test_steps_that_are_no_whole_numbers(step: Any):
    with pytest.raises(tdc.IndexingError, match="a whole number as step of a slice"):
        images()[:, :, ::step]
