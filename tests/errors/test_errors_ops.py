"""What operations on batches say when torch refuses a leaf, and when operands do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, T, Texts, ragged, says, tree

import tdc
from tdc import TensorDict

ROWS = T([0, 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.index_select(0, [1]), lambda td: td.index_select(0, T([9])), lambda td: td.narrow(0, 2, 9),
        lambda td: td.select(0, 9), lambda td: td.gather(0, T([[9]])), lambda td: td.scatter(0, T([[9]]), 1.0),
        lambda td: td.unfold(0, 9, 1), lambda td: td.index_add(0, ROWS, 1.0), lambda td: td.roll((1, 2), 0),
        lambda td: td.repeat_interleave(T([1, 2]), 0), lambda td: td.movedim((0, 1), 0), lambda td: td.sum((0, 0)),
        lambda td: td.topk(9, 0), lambda td: td.transpose(0, 1).view(12), lambda td: td.flatten(1, 0),
        lambda td: td.squeeze("a"),
    ],
)  # fmt: skip
def test_every_refusal_is_of_the_library(call: Callable[[TensorDict], Any]):
    with pytest.raises(tdc.TdcError, match=r"tdc\.(?!lift)\w+: expected .*, got .*(\n.*)*\nhint: "):
        call(tree())


def test_one_row_by_a_number():
    assert torch.equal(tree().index_select(0, T(1)), tree()[1:2])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.repeat(2), lambda x: x.repeat(-1, 1, 1), lambda x: x.roll((1, 2), (1,)), lambda x: x.expand(3),
        lambda x: x.expand(-1, -1, 5), lambda x: x.unflatten(2, (3, 2)), lambda x: x.unflatten(2, (-1, 3)),
    ],
)  # fmt: skip
def test_sizes_that_no_ragged_batch_has(call: Callable[[Any], Any]):
    with pytest.raises(tdc.ShapeError):
        call(ragged())


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("name", ["roll", "repeat_interleave"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_truth_value_is_no_number_of_steps(kind: str, name: str, dim: int):
    x = ragged() if kind == "nested" else ragged().to_padded()
    with pytest.raises(tdc.DtypeError, match=f"tdc.{name}: expected an int, got bool"):
        getattr(x, name)(True, dim)


def test_no_copies():
    assert ragged().repeat(0, 1, 1).shape == (0, -1, 4)


SAYS: dict[str, Says] = {
    "halves of a ragged dim": (lambda: F.glu(tdc.pack([torch.ones(4, 2), torch.ones(2, 2)]), 1), """\
ShapeError
tdc.glu: expected a static dim of even size, got dim 1 of NestedTensor float32[2, -1, 2]
hint: name the dim of the features, 2 * D of them, e.g. behind nn.Linear(D, 2 * D)"""),
    "halves of an odd size": (lambda: torch.nn.GLU()(tdc.pack([torch.ones(4, 3)]).to_padded()), """\
ShapeError
tdc.glu: expected a static dim of even size, got dim -1 of MaskedBatch float32[1, 4, 3]
hint: name the dim of the features, 2 * D of them, e.g. behind nn.Linear(D, 2 * D)"""),
    "halves of the batch": (lambda: F.glu(tdc.pack([torch.ones(4, 3)]), 0), """\
ShapeError
tdc.glu: expected a static dim of even size, got dim 0 of NestedTensor float32[1, -1, 3]
hint: name the dim of the features, 2 * D of them, e.g. behind nn.Linear(D, 2 * D)"""),
    "halves of an odd batch": (lambda: F.glu(TensorDict({"a": torch.ones(3, 2)}, [3])), """\
ShapeError
tdc.glu: expected arguments for batch_size [3], got others
at a: Tensor float32[3, 2]
hint: torch: Halving dimension must be even, but dimension 0 is size 3"""),
    "a row out of range": (lambda: tree().select(0, 9), """\
KeyPathError
tdc.select: expected a str or a non-empty tuple of str, got 0 of type int
hint: spell it like "a" or ("a", "b")"""),
    "several results out of range": (lambda: tree().topk(9, 0), """\
ShapeError
tdc.topk: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2]
at meta.label: Tensor int64[3, 4]
hint: torch: selected index k out of range"""),
    "a stack of a tensor": (lambda: torch.stack([tree(), torch.zeros(3)]), """\
StructureError
tdc.stack: expected operands that are all TensorDict, got 1 others
at operand 1: Tensor float32[3]
hint: make each a TensorDict first"""),
    "a cat of a ragged batch": (lambda: torch.cat([tree(), ragged()]), """\
StructureError
tdc.cat: expected operands that are all TensorDict, got 1 others
at operand 1: NestedTensor float32[3, -1, 4]
hint: make each a TensorDict first"""),
    "repeats of another number": (lambda: tree().repeat_interleave(T([1, 2]), 0), """\
ShapeError
tdc.repeat_interleave: expected 3 numbers of times, or one, got Tensor int64[2]
hint: one for each example along the dim"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_stack_of_other_features(self):
        a, b = tree(), tree().set("tokens", torch.zeros(3, 4, 5))
        self.says(lambda: torch.stack([a, b]), """\
ShapeError
tdc.stack: expected leaves of one shape for each key, got 1 keys that differ
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 5]
hint: tdc.data.pad_sequence(tds) or tdc.data.ragged_stack(tds) for rows that differ, or exclude the key""")  # fmt: skip

    def test_a_cat_of_other_features(self):
        a, b = tree(), tree().set("tokens", torch.zeros(3, 4, 5)).set(("meta", "label"), torch.zeros(3, 4, 1))
        self.says(lambda: torch.cat([a, a, b]), """\
ShapeError
tdc.cat: expected leaves of one shape for each key, got 2 keys that differ
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 5]
at meta.label: Tensor int64[3, 4] and Tensor float32[3, 4, 1]
hint: tdc.data.pad_sequence(tds) or tdc.data.ragged_stack(tds) for rows that differ, or exclude the key""")  # fmt: skip
