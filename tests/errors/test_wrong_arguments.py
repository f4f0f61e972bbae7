"""Arguments that a newcomer gets wrong: another kind, a size or step of 0, a name that is none; eagerly and in a graph.

torch refuses each of these calls on one example, too. What is checked here is that we do so in our words, and that the
kinds which `core.calls` reads in torch's declarations are those of every sound call in the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import samples
from harness import Draw
from torch._dynamo.exc import TorchDynamoException

import tdc
from tdc.core.calls import refuse_kinds
from tdc.core.errors import DtypeError, TdcError
from tdc.core.rules import KINDS, RULES
from tdc.testing.batches import build

ROWS = [torch.randn(3, 4), torch.randn(2, 4)]
X = tdc.pack(ROWS)
CHANNELS = X.transpose(1, 2)
IMAGES = tdc.pack([torch.randn(4, 2, 4), torch.randn(4, 6, 4)], ragged_dim=2)
SQUARES = tdc.pack([torch.randn(2, 3), torch.randn(3, 2)], ragged_dim=(1, 2))
KERNEL = torch.randn(5, 4, 1)
ONES = torch.ones(4, dtype=torch.float64)
STATE = torch.zeros(1, 2, 4)
INDEX = torch.zeros(1, 2, dtype=torch.int64)
TD = tdc.TensorDict({"x": torch.randn(3, 2)}, [3])
call: Any = torch
Call = tuple[Callable[[Any], Any], Any, str]
CALLS: dict[str, Call] = {
    "roll by a bool": (lambda x: x.roll(True, 1), X, "roll: expected an int, got bool"),
    "roll by a float": (lambda x: x.roll(1.5, 1), X, "roll: expected an int, got float"),
    "roll along a bool": (lambda x: x.roll(1, True), X, "roll: expected an int, got bool"),
    "dim of a string": (lambda x: x.sum("features"), X, "sum: expected an int, got str"),
    "padding of no such name": (
        lambda x: F.conv1d(x, KERNEL, padding="full"), CHANNELS, "expected padding='same' or 'valid', got 'full'"
    ),
    "stride 0": (lambda x: F.conv1d(x, KERNEL, stride=0), CHANNELS, "conv1d: expected stride of 1 or more, got 0"),
    "stride 0, transposed": (
        lambda x: F.conv_transpose1d(x, KERNEL.transpose(0, 1), stride=0), CHANNELS, "expected stride of 1 or more"
    ),
    "dilation 0": (lambda x: F.conv1d(x, KERNEL, dilation=0), CHANNELS, "expected dilation of 1 or more, got 0"),
    "padding below 0": (lambda x: F.conv1d(x, KERNEL, padding=-1), CHANNELS, "expected padding of 0 or more, got -1"),
    "kernel of a bool": (lambda x: F.max_pool1d(x, True), CHANNELS, "max_pool1d: expected an int, got bool"),
    "no kernel": (lambda x: F.max_pool1d(x, None), CHANNELS, "max_pool1d: expected"),
    "padding of a string": (lambda x: F.max_pool1d(x, 2, padding="same"), CHANNELS, "max_pool1d: expected"),
    "divisor 0": (lambda x: F.avg_pool2d(x, 1, divisor_override=0), IMAGES, "expected a divisor_override other than 0"),
    "shuffle by 0": (lambda x: F.pixel_shuffle(x, 0), IMAGES, "expected upscale_factor of 1 or more, got 0"),
    "unshuffle by 0": (lambda x: F.pixel_unshuffle(x, 0), IMAGES, "expected downscale_factor of 1 or more, got 0"),
    "windows of step 0": (lambda x: x.unfold(1, 1, 0), X, "unfold: expected step of 1 or more, got 0"),
    "windows of step -1": (lambda x: x.unfold(1, 1, -1), X, "unfold: expected step of 1 or more, got -1"),
    "windows of size -1": (lambda x: x.unfold(1, -1, 1), X, "unfold: expected size of 0 or more, got -1"),
    "windows of size 1.5": (lambda x: x.unfold(1, 1.5, 1), X, "unfold: expected an int, got float"),
    "complex angles": (lambda x: F.cosine_similarity(x.cfloat(), x, 1), X, "cosine_similarity: expected real numbers"),
    "complex groups": (lambda x: F.group_norm(x.cfloat(), 2), CHANNELS, "expected a real floating point dtype"),
    "slopes of integers": (lambda x: F.prelu(x.int(), ONES.int()), CHANNELS, "expected a real floating point dtype"),
    "no target": (lambda x: F.cross_entropy(x, None), X, "cross_entropy: expected target to be a tensor, got NoneType"),
    "no reduction": (lambda x: F.mse_loss(x, x, reduction=None), X, "expected reduction 'mean', 'sum' or 'none'"),
    "one size": (lambda x: F.layer_norm(x, 4), X, "layer_norm: expected normalized_shape to be ints, got int"),
    "operand None": (lambda x: torch.einsum("bij,jk->bik", x, None), X, "einsum: expected tensors to be a tensor"),
    "operand of a string": (lambda x: call.cdist(x, "x"), X, "cdist: expected x2 to be a tensor, got str"),
    "no groups": (lambda x: F.group_norm(x, 0), CHANNELS, "group_norm: expected num_groups of 1 or more, got 0"),
    "groups of channels": (lambda x: F.channel_shuffle(x, 0), IMAGES, "expected groups of 1 or more, got 0"),
    "weights of two dims": (
        lambda x: F.batch_norm(x, None, None, torch.ones(1, 4), training=True), CHANNELS, "expected one number for each"
    ),
    "scale 0": (lambda x: F.interpolate(x, scale_factor=0), IMAGES, "interpolate: expected scale_factor above 0"),
    "no quantile": (lambda x: x.quantile(torch.ones(0), 1), X, "quantile: expected at least one quantile, got none"),
    "a dim twice": (lambda x: x.sum((1, 1)), X, "sum: expected"),
    "a ragged letter twice": (lambda x: torch.einsum("bll->b", x), SQUARES, "einsum: expected letter"),
    "as many dims as a batch": (lambda x: call.kron(x, torch.ones(2, 2, 2)), X, "kron: expected as many dims"),
    "dims None": (lambda x: torch.tensordot(x, KERNEL[..., 0].mT, None), X, "expected dims of one and of the other"),
    "dims in another order": (lambda x: x.flatten(2, 1), X, "flatten: expected start_dim in front of end_dim"),
    "probability of a string": (lambda x: F.dropout1d(x, "half"), CHANNELS, "expected p to be a number, got str"),
    "training of a number": (
        lambda x: F.dropout1d(x, 0.5, 1), CHANNELS, "dropout: expected training to be True or False, got int"
    ),
    "training of a string": (
        lambda x: F.feature_alpha_dropout(x, 0.5, "no"), CHANNELS, "expected training to be True or False, got str"
    ),
    "probability above 1": (lambda x: F.dropout1d(x, 1.5), CHANNELS, "expected a probability p in [0, 1], got 1.5"),
    "mask as index": (lambda x: x.gather(1, x > 0), X, "gather: expected an index of int32 or int64, got "),
    "mask as index of all": (lambda x: x.index_select(2, torch.ones(4) > 0), X, "expected an index of int32 or int64"),
    "mask to take": (lambda x: x.take(torch.ones(2) > 0), X, "take: expected an index of int32 or int64"),
    "mask to scatter": (lambda x: x.scatter(1, x > 0, 0.0), X, "scatter: expected an index of int32 or int64"),
    "bytes to fill": (lambda x: x.index_fill(2, torch.ones(2).byte(), 0.0), X, "expected an index of int32 or int64"),
    "index of two dims": (lambda x: x.index_select(2, INDEX), X, "index_select: expected a vector of positions"),
    "values of integers": (
        lambda x: x.index_put((torch.tensor([0]),), torch.tensor(3)), X, "expected values of torch.float32"
    ),
    "too few weights": (
        lambda x: torch.lstm(x.mT, (STATE, STATE), [], True, 1, 0.0, False, False, True), CHANNELS,
        "lstm: expected 4 weights of 1 layers and directions, got 0"
    ),
    "weights of a group in another dtype": (
        lambda x: F.group_norm(x, 2, ONES), CHANNELS, "group_norm: expected weights of torch.float32, got "
    ),
    "weights of an example in another dtype": (
        lambda x: F.instance_norm(x, bias=ONES), CHANNELS, "instance_norm: expected weights of torch.float32, got "
    ),
    "weights of a batch in another dtype": (
        lambda x: F.batch_norm(x, None, None, ONES, training=True), CHANNELS, "batch_norm: expected weights of "
    ),
    "slopes in another dtype": (lambda x: F.prelu(x, ONES), CHANNELS, "prelu: expected weights of torch.float32, got "),
    "source of integers": (lambda x: x.masked_scatter(x > 0, torch.ones(20).long()), X, "expected a source of "),
}  # fmt: skip
EAGER: dict[str, Call] = {  # in a graph Dynamo says itself what does not bind, and lengths are compared when it runs
    "rows of other lengths": (
        lambda x: torch.einsum("blm,bml->b", x, x), SQUARES, "einsum: expected rows of equal lengths, got others"
    ),
    "heights that 4 does not divide": (lambda x: F.pixel_unshuffle(x, 4), IMAGES, "expected heights and widths that 4"),
    "an argument too few": (lambda x: x.unfold(1, 1), X, "unfold: expected an argument step, got none"),
    "a batch of other sizes": (
        lambda x: torch.cat([x[:, None], x[:, None].expand(3, 2)]), TD, "expected batch sizes like [3, 1]"
    ),
    "no dim": (lambda x: x.scatter_add(index=x["x"].long(), src=x["x"]), TD, "expected a dim in [-1, 0], got None"),
    "a float for a dim": (lambda x: tdc.NestedTensor(x["x"], torch.tensor([0, 3]), ragged_dim=1.5), TD, "an int, got"),
    "an argument twice": (lambda x: x.unfold(0, 1, 1, step=1), TD, "unfold: expected one step, got two"),
}  # fmt: skip
KNOWN = (torch.unflatten, F.interpolate)  # take more: a batch instead of sizes


@pytest.mark.parametrize("name", [*CALLS, *EAGER])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_wrong_argument_is_refused(name: str, kind: str):
    fn, x, text = (CALLS | EAGER)[name]
    x = x.to_padded() if kind == "padded" and x is not TD else x
    with pytest.raises(TdcError) as error:
        fn(x)
    assert text in str(error.value)


@pytest.mark.cases(slow=12)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, n in enumerate(CALLS)])
def test_a_graph_refuses_it_too(name: str):
    fn, x, text = CALLS[name]
    torch.compiler.reset()
    with pytest.raises(TorchDynamoException) as error:
        torch.compile(fn, backend="eager", fullgraph=True)(x)
    assert text in str(error.value).replace("\\'", "'")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_call_has_the_kinds_that_torch_declares(kind: str):
    refused = []
    for rule in [rule for rule in RULES if rule.kind == kind and not rule.reason and rule.op not in KNOWN]:
        for sample in samples(rule)[:2]:
            args, kwargs = build(sample.draw(Draw(kind, (3, 2))), kind, lambda t: t)
            try:
                refuse_kinds(rule.op, args, kwargs)
            except DtypeError as error:
                refused.append(f"{rule}, {sample.label}: {error}")
    assert not refused, "\n".join(refused)


def test_an_error_of_torch_keeps_its_words_and_what_catches_it():
    with pytest.raises(RuntimeError) as error:
        torch.matmul(X, torch.randn(4, 2, dtype=torch.float64))
    assert isinstance(error.value, tdc.CallError)
    assert "torch: " in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)
