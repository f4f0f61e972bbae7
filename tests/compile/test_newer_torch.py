"""What torch does otherwise from 2.14 on, each by the smallest program. The list for users is docs/torch_versions.md.

One that fails on a newer torch is mended there: what works around it may go when the last torch that has it leaves the
range.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from versions import before

from tdc.core.torch_functions import is_handed_on


def places() -> Iterator[int]:
    yield from [1]


def leave_early(x: Tensor) -> Tensor:
    for place in places():
        return x + place
    return x


def test_dynamo_leaves_no_generator_within_a_list():
    """`candidates` in tdc/ops/shape/dims.py yields one by one."""
    run = torch.compile(leave_early, backend="eager", fullgraph=True)
    if before(2, 14):
        assert run(torch.ones(2)).tolist() == [2, 2]
    else:
        with pytest.raises(Exception, match="close"):
            run(torch.ones(2))


@pytest.mark.slow  # Inductor
def test_inductor_takes_a_product_with_one_for_its_operand():
    """`upstream.computed` in tdc/compile makes a tensor of its own by negating it twice."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y, y * 1, y.neg().neg()

    first, product, negated = torch.compile(fn, fullgraph=True)(torch.ones(3))
    assert (first.data_ptr() == product.data_ptr()) is not before(2, 14)
    assert first.data_ptr() != negated.data_ptr()


def test_group_norm_refuses_examples_without_positions():
    """Our group norm leaves them out."""
    if before(2, 14):
        assert F.group_norm(torch.ones(2, 4, 0), 2).shape == (2, 4, 0)
    else:
        with pytest.raises(RuntimeError, match="HxW"):
            F.group_norm(torch.ones(2, 4, 0), 2)


def test_clamp_has_no_gradient_at_its_bounds():
    """No rule relies on it: each takes torch's own derivative."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    x.clamp(0, 1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([1, 1] if before(2, 14) else [0, 0])


def test_torch_hands_on_no_qr():
    """The rows of `torch.qr` and `torch.cholesky` are there where torch hands the functions on."""
    assert is_handed_on(torch.qr) is before(2, 14)
