"""`F.ctc_loss` of ragged batches equals the loop over pairs, eagerly and in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from torch.testing import assert_close

import tdc

BLANK = 2
functions: Any = torch.nn.functional  # whose stubs want lengths
PAIRS = (((7, 9, 5), (2, 3, 0)), ((4, 12), (5, 1)), ((6, 6, 8, 10), (1, 1, 2, 3)))  # 4 frames are too few for 5 labels


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("reduction", "zero_infinity"), [("mean", True), ("sum", True), ("none", False)])
def test_values_and_gradients_in_one_graph(reduction: str, zero_infinity: bool):
    how: dict[str, Any] = {"blank": BLANK, "zero_infinity": zero_infinity}

    def loss(x: Any, labels: Any) -> Any:
        return functions.ctc_loss(x.log_softmax(-1), labels, None, None, reduction=reduction, **how)

    counter = Counter("aot_eager")
    graph = torch.compile(loss, fullgraph=True, backend=counter)
    torch.manual_seed(0)
    for frames, labels in PAIRS:
        rows = [torch.randn(n, 6, requires_grad=True) for n in frames]
        texts = [torch.randint(BLANK + 1, 6, (n,)) for n in labels]
        each = torch.stack([one(x, t, how) for x, t in zip(rows, texts, strict=True)])
        counts = torch.tensor(labels).clamp(min=1)
        want = {"mean": (each / counts).mean(), "sum": each.sum(), "none": each}[reduction]
        grads = torch.autograd.grad(want.sum(), rows)
        x, t = tdc.pack([row.detach() for row in rows]), tdc.pack(texts)
        for call, a, b in ((loss, x, t), (loss, x.to_padded(float("nan")), t.to_padded()), (graph, x, t)):
            leaf: Any = a.detach().requires_grad_()
            found = call(leaf, b)
            assert_close(found, want, rtol=1e-5, atol=1e-5)
            found.sum().backward()
            assert_close(leaf.grad.unbind(), grads, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert counter.graphs == 1


def one(x: Any, labels: Any, how: dict[str, Any]) -> Any:
    """The loss of one pair."""
    lengths = torch.tensor(len(x)), torch.tensor(len(labels))
    return functions.ctc_loss(x.log_softmax(-1), labels, *lengths, reduction="none", **how)


def test_texts_without_labels():
    x = tdc.pack([torch.randn(5, 4), torch.randn(3, 4)]).log_softmax(-1)
    labels = tdc.pack([torch.zeros(0, dtype=torch.int64)] * 2)
    found = functions.ctc_loss(x, labels, None, None, reduction="none")
    assert_close(found, torch.stack([-row[:, 0].sum() for row in x.unbind()]))


def test_a_second_derivative_is_refused():
    x: Any = tdc.pack([torch.randn(5, 4), torch.randn(3, 4)]).requires_grad_()
    labels = tdc.pack([torch.tensor([1]), torch.tensor([3])])
    loss = functions.ctc_loss(x.log_softmax(-1), labels, None, None)
    (grad,) = torch.autograd.grad(loss, x.values, create_graph=True)
    with pytest.raises(tdc.UnsupportedError, match="one derivative"):
        grad.square().sum().backward()
