"""jaxtyping 0.3: annotations name containers where they name Tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch import Tensor

import tdc
from tdc import MaskedBatch, NestedTensor, StructureError, TensorDict

jaxtyping: Any = pytest.importorskip("jaxtyping")
beartype: Any = pytest.importorskip("beartype")

pytestmark = pytest.mark.clients
Float, Int, Shaped = jaxtyping.Float, jaxtyping.Int, jaxtyping.Shaped
X = tdc.pack([torch.randn(n, 4) for n in (2, 0, 3)])
if TYPE_CHECKING:  # which knows no names in brackets
    Packed: TypeAlias = NestedTensor
    Padded: TypeAlias = MaskedBatch
    Either: TypeAlias = NestedTensor | MaskedBatch
    Labels: TypeAlias = Tensor
else:
    Packed, Padded, Either = [Float[x, "b t d"] for x in (NestedTensor, MaskedBatch, NestedTensor | MaskedBatch)]
    Labels = Int[Tensor, "b"]
checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)


@pytest.mark.parametrize("x", [X, X.to_padded()], ids=["packed", "padded"])
@pytest.mark.parametrize("sizes", ["b t d", "3 t 4", "b _ 4", "b ... 4", "b *sizes"])
def test_sizes_that_hold(x: Any, sizes: str):
    assert isinstance(x, Float[type(x), sizes])
    assert not isinstance(x, Float[Tensor, sizes])
    assert not isinstance(x, Int[type(x), sizes])


@pytest.mark.parametrize("sizes", ["b t", "2 t 4", "b t 5", "b 3 4"])
def test_sizes_that_do_not(sizes: str):
    assert not isinstance(X, Float[NestedTensor, sizes])


def test_batch_dims_of_a_tensordict():
    td = TensorDict({"x": torch.zeros(3, 4), "id": torch.arange(3)}, [3])
    assert isinstance(td, Shaped[TensorDict, "3"])
    assert not isinstance(td, Shaped[TensorDict, "b d"])


def test_a_name_is_one_size_in_a_call():
    @checked
    def add(x: Packed, y: Packed) -> Packed:
        return x + y

    @checked
    def both(x: Packed, y: Padded) -> None: ...

    @checked
    def lengths(x: Either) -> Labels:
        return x.lengths.flatten()

    assert lengths(X).tolist() == lengths(X.to_padded()).tolist() == [2, 0, 3]
    assert add(X, X).shape == X.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        add(X, X[:2])
    with pytest.raises(jaxtyping.TypeCheckError):
        both(X, X.to_padded())
    with pytest.raises(StructureError, match="rows of different lengths"):  # of which jaxtyping sees -1
        add(X, tdc.pack([torch.randn(n, 4) for n in (1, 1, 3)]))


def test_checks_around_what_is_compiled():
    compiled = torch.compile(lambda x: x.relu(), backend="eager", fullgraph=True)

    @checked
    def relu(x: Packed) -> Packed:
        return compiled(x)

    assert torch.equal(relu(X).values, X.values.relu())


def test_fields_of_a_tensorclass():
    class Batch(tdc.TensorClass):
        tokens: Packed
        label: Labels | None = None

    batch = Batch(X, batch_size=[3])
    assert (type(batch[:2].tokens), batch.label, batch[0].tokens.shape) == (NestedTensor, None, (2, 4))
