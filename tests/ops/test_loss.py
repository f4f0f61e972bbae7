"""Losses of ragged batches through stock modules: packed and padded agree, padding counts for nothing, wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import T, Texts
from torch import nn
from torch.testing import assert_close

import tdc

LENGTHS = (3, 1, 4)


def rows() -> list[torch.Tensor]:
    return [torch.randn(n, 5) for n in LENGTHS]


def test_a_weight_for_each_feature():
    module: Any = nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 6))
    x, y = rows(), [row.sigmoid() for row in rows()]
    for kind in ("nested", "masked"):
        found = module(as_kind(tdc.pack(x), kind), as_kind(tdc.pack(y), kind))
        torch.testing.assert_close(found, module(torch.cat(x), torch.cat(y)))


def test_dense_target_broadcasts():
    x: Any = tdc.pack(rows())
    y = torch.randn(3, 1, 5)
    want = torch.cat([(row - t).square() for row, t in zip(x.unbind(), y, strict=True)]).mean()
    torch.testing.assert_close(F.mse_loss(x, y), want)


class TestTexts(Texts):
    def test_reduction(self):
        x: Any = tdc.pack(rows())
        self.says(lambda: F.mse_loss(x, x, reduction="max"), """\
ShapeError
tdc.mse_loss: expected reduction 'mean', 'sum' or 'none', got 'max'
hint: torch has no others""")  # fmt: skip

    def test_lengths_of_ctc(self):
        frames, labels = tdc.pack([torch.randn(5, 4).log_softmax(-1)]), tdc.pack([T([1, 2])])
        ctc_loss: Any = F.ctc_loss
        self.says(lambda: ctc_loss(frames, labels, T([5]), T([2])), """\
StructureError
tdc.ctc_loss: expected None for both lengths, got lengths
hint: F.ctc_loss(log_probs, targets, None, None): ragged batches know them""")  # fmt: skip

    def test_ctc_of_tensors(self):
        labels: Any = tdc.pack([T([1, 2])])
        ctc_loss: Any = F.ctc_loss
        self.says(lambda: ctc_loss(torch.randn(5, 1, 4), labels, None, None), """\
StructureError
tdc.ctc_loss: expected log_probs and targets that are both ragged, got Tensor float32[5, 1, 4] and NestedTensor \
int64[1, -1]
hint: tdc.pack both""")  # fmt: skip

    def test_settings_of_ctc(self):
        """Found by reading: torch's own errors became one about the lengths, which are None here."""
        frames, labels = tdc.pack([torch.randn(5, 4), torch.randn(3, 4)]), tdc.pack([T([1, 2]), T([3])])
        ctc_loss: Any = F.ctc_loss
        self.says(lambda: ctc_loss(frames, labels, None, None, blank=4), """\
ShapeError
tdc.ctc_loss: expected blank in [0, 3], one of the classes, got 4
hint: blank=0""")  # fmt: skip
        self.says(lambda: ctc_loss(frames, labels[:1], None, None), """\
StructureError
tdc.ctc_loss: expected as many examples of targets as of log_probs, got 1 and 2
hint: pair the batches example by example""")  # fmt: skip
        self.says(lambda: ctc_loss(frames.half(), labels, None, None), """\
DtypeError
tdc.ctc_loss: expected float32 or float64, got NestedTensor float16[2, -1, 4]
hint: log_probs.float()""")  # fmt: skip
        self.says(lambda: ctc_loss(frames[:0], labels[:0], None, None), """\
ShapeError
tdc.ctc_loss: expected a frame or more, got NestedTensor float32[0, -1, 4]
hint: leave out the loss of a batch without examples or frames""")  # fmt: skip

    def test_bags_with_offsets(self):
        bags: Any = tdc.pack([T([1, 2])])
        self.says(lambda: F.embedding_bag(bags, torch.zeros(4, 2), T([0])), """\
ShapeError
tdc.embedding_bag: expected a ragged batch of indices and no offsets, got NestedTensor int64[1, -1] and offsets
hint: F.embedding_bag(rows, weight): rows are bags""")  # fmt: skip

    def test_weights_of_a_mean(self):
        bags: Any = tdc.pack([T([1, 2])])
        weights: Any = bags.with_values(torch.ones(2))
        self.says(lambda: F.embedding_bag(bags, torch.zeros(4, 2), per_sample_weights=weights, mode="mean"), """\
UnsupportedError
tdc.embedding_bag: expected weights with mode='sum', got per_sample_weights with mode='mean'
hint: mode='sum'""")  # fmt: skip


functions: Any = F
BATCH = tdc.pack([torch.rand(n, 3) for n in (3, 1, 2)])


def as_kind(x: Any, kind: str) -> Any:
    return x if kind == "nested" else x.to_padded()


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_legacy_reduction(kind: str):
    """`size_average`, `reduce` and `reduction` in torch's order, by name or by position."""
    x: Any = as_kind(BATCH, kind)
    y = x.with_values(BATCH.values.flip(0)) if kind == "nested" else x.with_data(x.data.flip(2))
    for args, reduction in (((False,), "sum"), ((None, False), "none"), ((True, True), "mean"), ((None, None), "mean")):
        got, want = functions.mse_loss(x, y, *args), F.mse_loss(x, y, reduction=reduction)
        pairs = zip(got.unbind(), want.unbind(), strict=True) if reduction == "none" else [(got, want)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(F.mse_loss(x, y, None, None, "sum"), F.mse_loss(x, y, size_average=False))


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_cross_entropy_of_probabilities(kind: str):
    """In both layouts; the mean counts positions."""
    logits, target = BATCH, BATCH.with_values(BATCH.values.softmax(-1))
    want = [
        F.cross_entropy(a, b, label_smoothing=0.1) * len(a)
        for a, b in zip(logits.unbind(), target.unbind(), strict=True)
    ]
    mean = torch.stack(want).sum() / 6
    for layout in (lambda x: x, lambda x: x.transpose(1, 2)):
        x, y = (layout(as_kind(t, kind)) for t in (logits, target))
        torch.testing.assert_close(F.cross_entropy(x, y, label_smoothing=0.1), mean)
        rows = F.cross_entropy(x, y, reduction="none").unbind()
        each = [F.cross_entropy(a, b, reduction="none") for a, b in zip(logits.unbind(), target.unbind(), strict=True)]
        assert all(torch.allclose(a, b) for a, b in zip(rows, each, strict=True))


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_dense_targets_of_losses_of_vectors(kind: str):
    """One number for each position, or one for each vector of numbers."""
    x: Any = as_kind(BATCH, kind)
    classes, signs, other = torch.randint(0, 3, (3, 3)), torch.ones(3, 3), torch.rand(3, 3, 3)
    for got, one in (
        (F.multi_margin_loss(x, classes, reduction="none"), lambda r, i: F.multi_margin_loss(
            r, classes[i, : len(r)], reduction="none")),
        (F.cosine_embedding_loss(x, other, signs, reduction="none"), lambda r, i: F.cosine_embedding_loss(
            r, other[i, : len(r)], signs[i, : len(r)], reduction="none")),
        (F.triplet_margin_loss(x, other, x, reduction="none"), lambda r, i: F.triplet_margin_loss(
            r, other[i, : len(r)], r, reduction="none")),
    ):  # fmt: skip
        want = [one(r, i) for i, r in enumerate(BATCH.unbind())]
        assert all(torch.allclose(a, b) for a, b in zip(got.unbind(), want, strict=True))


def test_dense_target_gets_no_gradient_from_padding():
    x: Any = BATCH.to_padded()
    target = torch.rand(3, 3, 3, requires_grad=True)
    F.binary_cross_entropy(x, target).backward()
    assert target.grad is not None
    assert target.grad.isfinite().all()
    assert not target.grad[1, 1:].any()


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_logits_that_are_dense_are_refused(kind: str):
    target = as_kind(tdc.pack([torch.zeros(n, dtype=torch.int64) for n in (3, 1, 2)]), kind)
    with pytest.raises(tdc.StructureError, match="logits and targets that are both"):
        F.cross_entropy(torch.rand(3, 3, 4), target)
    with pytest.raises(tdc.ShapeError, match="a static dim of classes"):
        F.cross_entropy(as_kind(tdc.pack([torch.rand(2), torch.rand(3)]), kind), target)


CTC_CALLS: dict[str, tuple[Any, str]] = {
    "blank below": (lambda loss, x, y: loss(x, y, None, None, blank=-1), "expected blank in [0, 3], one of "),
    "blank beyond": (lambda loss, x, y: loss(x, y, None, None, 4), "expected blank in [0, 3], one of "),
    "blank of text": (lambda loss, x, y: loss(x, y, None, None, blank="a"), "expected an int, got str"),
    "reduction": (lambda loss, x, y: loss(x, y, None, None, reduction="max"), "expected reduction 'mean', 'sum' or"),
    "zero_infinity": (lambda loss, x, y: loss(x, y, None, None, zero_infinity="a"), "zero_infinity to be True or Fa"),
    "examples": (lambda loss, x, y: loss(x[1:], y, None, None), "as many examples of targets as of log_probs, got 2 "),
    "half": (lambda loss, x, y: loss(x.bfloat16(), y, None, None), "expected float32 or float64, got "),
    "integers": (lambda loss, x, y: loss(x.long(), y, None, None), "expected float32 or float64, got "),
    "complex": (lambda loss, x, y: loss(x.to(torch.complex64), y, None, None), "expected float32 or float64, got "),
    "no examples": (lambda loss, x, y: loss(x[:0], y[:0], None, None), "expected a frame or more, got "),
    "no frames": (lambda loss, x, y: loss(x[:, :0], y, None, None), "expected a frame or more, got "),
    "batch behind": (lambda loss, x, y: loss(x.transpose(0, 2), y, None, None), "expected (B, -1, C), got "),
}


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("name", CTC_CALLS)
def test_a_wrong_call_of_ctc_loss(name: str, kind: str):
    call, text = CTC_CALLS[name]
    frames = as_kind(tdc.pack([torch.randn(n, 4) for n in (5, 3)]), kind)
    with pytest.raises(tdc.TdcError) as error:
        call(F.ctc_loss, frames, as_kind(tdc.pack([torch.tensor([1, 2]), torch.tensor([3])]), kind))
    assert text in str(error.value)


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_ctc_loss_of_half_precision_under_autocast(kind: str):
    """There torch casts on CPU (2.13), so half precision is taken."""
    frames = as_kind(tdc.pack([torch.randn(n, 4).bfloat16().log_softmax(-1) for n in (5, 3)]), kind)
    labels = as_kind(tdc.pack([torch.tensor([1, 2]), torch.tensor([3])]), kind)
    with torch.autocast("cpu", torch.bfloat16):
        found = functions.ctc_loss(frames, labels, None, None)
    torch.testing.assert_close(found, functions.ctc_loss(frames.float(), labels, None, None))


BROADCAST: Any = [
    F.mse_loss, F.l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss,
    lambda x, y, **kw: F.gaussian_nll_loss(x, y, 0.5, **kw),
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("loss", BROADCAST)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_one_feature_meets_many(loss: Any, kind: str, reduction: str):
    one, many, dense = [[torch.rand(n, k) for n in LENGTHS] for k in (1, 4, 4)]
    x, y, z = as_kind(tdc.pack(one), kind), as_kind(tdc.pack(many), kind), dense[0][:1]
    for a, b, parts in ((x, y, [(p, q) for p, q in zip(one, many, strict=True)]), (x, z, [(p, z) for p in one])):
        want = [loss(p, q, reduction="none") for p, q in parts]
        got = loss(a, b, reduction=reduction)
        if reduction == "none":
            torch.testing.assert_close([*got.unbind()], want)
        else:
            torch.testing.assert_close(got, torch.cat(want).mean())


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_vectors_are_no_longer_than_they_are(kind: str):
    small, one, many = [[s * torch.rand(n, k) for n in LENGTHS] for s, k in ((1e-7, 4), (1.0, 1), (1.0, 4))]
    y = torch.tensor([1, -1, 1])[:, None]
    for a, b in ((small, many), (many, one), (one, many)):
        got = functions.cosine_embedding_loss(*[as_kind(tdc.pack(r), kind) for r in (a, b)], y, reduction="none")
        want = [
            F.cosine_embedding_loss(p, q, t.expand(len(p)), reduction="none") for p, q, t in zip(a, b, y, strict=True)
        ]
        torch.testing.assert_close([*got.unbind()], want)


@pytest.mark.parametrize("loss", [F.mse_loss, F.triplet_margin_loss])
def test_a_longer_dense_target_of_a_rectangle_of_one_position(loss: Any):
    x: Any = tdc.pack([torch.rand(1, 4)] * 3).to_padded()
    with pytest.raises(tdc.ShapeError, match="expected an operand that broadcasts against MaskedBatch"):
        loss(x, *[torch.rand(5, 4)] * (1 + (loss is F.triplet_margin_loss)))


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, F.binary_cross_entropy_with_logits])
def test_probabilities_of_other_sizes_are_refused(loss: Any, kind: str):
    x = as_kind(tdc.pack([torch.rand(n, 4) for n in LENGTHS]), kind)
    for target in (x[:, :, :1], torch.rand(3, 1, 1)):
        with pytest.raises(tdc.ShapeError, match="expected input and target of equal static sizes"):
            loss(x, target)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_end_at_the_first_negative_one_in_a_graph(kind: str, reduction: str):
    """torch's decomposition (2.11-2.13) takes what follows it for class 0."""
    labels = torch.tensor([[1, 0, -1, 2], [3, 3, -1, -1], [-1, 2, 1, 0], [2, 1, 3, 0]])
    scores, loss = torch.randint(-2, 3, (4, 4)).float(), F.multilabel_margin_loss  # some margins are 0
    run = torch.compile(loss, backend="aot_eager", fullgraph=True)
    x, y = [as_kind(tdc.pack(list(t.split([3, 1]))), kind) for t in (scores, labels)]
    want, alone = torch.func.vjp(lambda t: loss(t, labels, reduction=reduction), scores)
    x = x.requires_grad_()
    found: Any = run(x, y, reduction=reduction)
    found = found if reduction == "mean" else torch.cat(list(found.unbind()))
    torch.testing.assert_close(found, want)
    found.sum().backward()
    torch.testing.assert_close(torch.cat(list(x.grad.unbind())), alone(torch.ones_like(want))[0])


@pytest.mark.parametrize("loss", [F.kl_div, F.poisson_nll_loss])
def test_a_number_as_a_tensor_widens_no_dtype(loss: Any):
    x = tdc.pack([torch.rand(2).half(), torch.rand(3).half()])
    for y in (x, x.to_padded()):
        for operands in ((y, torch.tensor(0.5)), (torch.tensor(0.5), y)):
            assert loss(*operands, reduction="none").dtype is torch.float16


# -- ctc_loss


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
