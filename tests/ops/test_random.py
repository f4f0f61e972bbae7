"""`F.gumbel_softmax` of ragged batches: the numbers torch draws, their distribution, gradients, and wrong inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tdc
from tdc import DtypeError, ShapeError, UnsupportedError
from tdc.compile import counted

LENGTHS = (3, 0, 5, 1)


def batch(*features: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tdc.pack([torch.randn(n, *features) for n in LENGTHS])


def drawn(values: Tensor, seed: int = 1) -> Tensor:
    """The numbers that torch adds to logits."""
    torch.manual_seed(seed)
    return -torch.empty_like(values).exponential_().log()


def seeded(x: Any, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return F.gumbel_softmax(x, *args, **kwargs)


@pytest.mark.parametrize("hard", [False, True])
def test_static_dim_is_torch_of_packed_values(hard: bool):
    x = batch(4).requires_grad_()
    got = seeded(x, 0.5, hard, dim=-1)
    values = x.values.detach().requires_grad_()
    want = seeded(values, 0.5, hard, dim=-1)
    assert torch.equal(got.values, want)
    weight = torch.randn(want.shape)
    (got.values * weight).sum().backward()
    (want * weight).sum().backward()
    assert torch.equal(x.values.grad, values.grad)


@pytest.mark.parametrize("hard", [False, True])
def test_ragged_dim_is_a_softmax_of_each_row(hard: bool):
    x = batch(2).requires_grad_()
    got = seeded(x, 0.7, hard, dim=1)
    noisy = x.with_values((x.values + drawn(x.values)) / 0.7)
    soft = [row.softmax(0) for row in noisy.unbind()]
    weight = torch.randn(x.values.shape)
    grads = torch.autograd.grad((torch.cat(soft) * weight).sum(), x.values)
    assert torch.equal(torch.autograd.grad((got.values * weight).sum(), x.values)[0].isfinite(), grads[0].isfinite())
    torch.testing.assert_close(
        torch.autograd.grad((seeded(x, 0.7, hard, dim=1).values * weight).sum(), x.values), grads
    )
    for row, part in zip(got.unbind(), soft, strict=True):
        place = F.one_hot(part.argmax(0), len(part)).t().float() if hard and len(part) else part
        torch.testing.assert_close(row, place)


@pytest.mark.parametrize("dim", [1, 2])
def test_padding_gets_no_share_and_spoils_no_gradient(dim: int):
    x = batch(3).to_padded(fill=float("nan")).requires_grad_()
    for hard in (False, True):
        out = seeded(x, hard=hard, dim=dim)
        rows = [row for row in out.unbind() if len(row)]
        torch.testing.assert_close(rows[0].sum(dim - 1), torch.ones(rows[0].sum(dim - 1).shape))
        (grad,) = torch.autograd.grad(torch.stack([row.square().sum() for row in rows]).sum(), x.data)
        assert grad.masked_select(x.mask).isfinite().all()
        assert dim == 2 or (grad.masked_select(~x.mask) == 0).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("padded", [False, True])
def test_each_row_is_drawn_from_its_own_softmax(padded: bool):
    rows = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, -0.5])]
    x = tdc.pack(rows * 4000)
    x = x.to_padded() if padded else x
    hits = seeded(x, hard=True, dim=1).unbind()
    for i, row in enumerate(rows):
        share = torch.stack(hits[i::2]).mean(0)
        torch.testing.assert_close(share, row.softmax(0), atol=0.03, rtol=0)


def test_one_graph_draws_anew_in_each_call():
    fn = counted(lambda x: F.gumbel_softmax(x, 0.5, True, dim=1), backend="aot_eager")
    x = batch()
    assert any([not torch.equal(fn(x).values, fn(x).values) for _ in range(20)])
    for other in (tdc.pack([torch.randn(n) for n in (4, 2)]), tdc.pack([torch.randn(n) for n in (7, 1, 6)])):
        torch.testing.assert_close(fn(other).sum(1), torch.ones(len(other)))
    assert (fn.counts.graphs, fn.counts.compiles) == (1, 1)


def test_tensordict_along_batch_dims():
    td = tdc.TensorDict({"a": torch.randn(2, 3, 4)}, [2, 3])
    want = seeded(td["a"], 0.5, True, dim=1)
    assert torch.equal(seeded(td, 0.5, True)["a"], want)


@pytest.mark.parametrize("padded", [False, True])
def test_the_batch_and_integers_are_refused(padded: bool):
    x = batch(2)
    x = x.to_padded() if padded else x
    with pytest.raises(UnsupportedError, match=r"tdc.gumbel_softmax: expected a static or ragged dim, got the batch"):
        F.gumbel_softmax(x, dim=0)
    with pytest.raises(ShapeError, match=r"tdc.gumbel_softmax: expected a dim in \[-3, 2\], got 3"):
        F.gumbel_softmax(x, dim=3)
    with pytest.raises(DtypeError, match=r"tdc.gumbel_softmax: expected floating point logits"):
        F.gumbel_softmax(x.long())
