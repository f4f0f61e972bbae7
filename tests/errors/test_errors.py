"""The text of every bad input: what was expected, where, and what to do. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from texts import Says, T, Texts, ragged, says, tree

from tdc import TdcError, TensorDict

SAYS: dict[str, Says] = {
    "set of another size": (lambda: tree().set("tokens", torch.zeros(4, 3)), """\
ShapeError
tdc.set: expected leaves of shape [3, 4, ...], got 1 that differ
at tokens: Tensor float32[4, 3]
hint: give the batch size all leaves share, reshape the leaf, or Shared(leaf) without batch dims"""),
    "values that are no tensors": (lambda: TensorDict({"name": "x", "rows": [T([1]), T([1, 2])]}), """\
DtypeError
tdc.TensorDict: expected tensors, arrays, numbers or mappings, got a value of another type
at name: str
hint: Static(x) for one object, ObjectArray(list) for one per example, tdc.pack for tensors of different sizes"""),
    "no mapping": (lambda: TensorDict([1, 2]), """\
DtypeError
tdc.TensorDict: expected a mapping of keys to tensors, got list
hint: TensorDict({'key': tensor}, batch_size=[...])"""),
    "a missing key": (lambda: tree()["tokns"], """\
KeyPathError
tdc.get: expected an existing key, got 'tokns'
hint: nearest keys: 'tokens'"""),
    "a missing nested key": (lambda: tree().get(("meta", "lable")), """\
KeyPathError
tdc.get: expected an existing key, got 'meta.lable'
hint: nearest keys: 'meta.label', 'meta'"""),
    "a missing key and none near": (lambda: tree().select("qqqqqqqqq"), """\
KeyPathError
tdc.select: expected an existing key, got 'qqqqqqqqq'
hint: nearest keys: 'meta', 'meta.label', 'tokens'"""),
    "a missing key and none at all": (lambda: TensorDict().delete("a"), """\
KeyPathError
tdc.delete: expected an existing key, got 'a'
hint: the TensorDict has no keys yet"""),
    "a key that is no str": (lambda: TensorDict({1: T(1)}), """\
KeyPathError
tdc.TensorDict: expected a str or a non-empty tuple of str, got 1 of type int
hint: spell it like "a" or ("a", "b")"""),
    "an empty key": (lambda: tree().set((), T(1)), """\
KeyPathError
tdc.set: expected a str or a non-empty tuple of str, got an empty tuple
hint: spell it like "a" or ("a", "b")"""),
    "a key below a leaf": (lambda: tree().set(("tokens", "x"), torch.zeros(3, 4)), """\
KeyPathError
tdc.set: expected inner nodes on the way to a key, got a leaf at 'tokens'
hint: delete 'tokens' first"""),
    "different keys": (lambda: tree() + tree().delete(("meta", "label")).set("new", torch.zeros(3, 4)), """\
StructureError
tdc.add: expected TensorDicts with the same keys, got 2 that differ
at meta.label: only in operand 0
at new: only in operand 1
hint: select the keys they share first"""),
    "different batch sizes": (lambda: tree() + tree()[0], """\
ShapeError
tdc.add: expected TensorDicts of one batch size, got [3, 4] and [4]
hint: index or expand one of them"""),
    "a tensor that does not broadcast": (lambda: tree() * torch.ones(3, 4, 2), """\
ShapeError
tdc.mul: expected a tensor that broadcasts against batch_size [3, 4], got Tensor float32[3, 4, 2]
hint: for features use td.apply(lambda leaf: ...)"""),
    "stack of different sizes": (lambda: torch.stack([tree(), tree()[:2]]), """\
ShapeError
tdc.stack: expected TensorDicts of one batch size, got [3, 4] and [2, 4]
hint: index or expand one of them"""),
    "an index out of range": (lambda: tree()[1, 7], """\
IndexingError
tdc.index: expected an index into batch_size [3, 4], got td[1, 7]
hint: dim 0 takes -3 to 2, dim 1 takes -4 to 3; keys are strings: td['key']"""),
    "an index vector out of range": (lambda: tree()[T([0, 3])], """\
IndexingError
tdc.index: expected an index into batch_size [3, 4], got td[Tensor int64[2]]
hint: dim 0 takes -3 to 2, dim 1 takes -4 to 3; keys are strings: td['key']"""),
    "too many indices": (lambda: tree()[0, 0, 0], """\
IndexingError
tdc.index: expected at most 2 batch dims indexed, got 3 indices
hint: index features leaf by leaf: td.apply(lambda x: x[...])"""),
    "a mask of another size": (lambda: tree()[torch.ones(4, dtype=torch.bool)], """\
IndexingError
tdc.index: expected a mask of shape [3], got mask of shape [4]
hint: a mask covers whole batch dims"""),
    "an index without batch dims": (lambda: TensorDict({"a": T([1, 2])})[0], """\
IndexingError
tdc.index: expected at least one batch dim, got batch_size=[]
hint: index a leaf, td['key'][i], or give the TensorDict a batch size"""),
    "an op without a rule": (lambda: torch.fft.fft(tree()), """\
UnsupportedError
tdc.fft: expected an operation with a rule for TensorDict, got 'fft', which has none
hint: apply it leaf by leaf with td.apply(fn)"""),
    "reshape to another number": (lambda: tree().reshape(5, -1), """\
ShapeError
tdc.reshape: expected sizes with 12 examples, batch_size [3, 4], got [5, -1]
hint: reshape acts on batch dims only; features stay"""),
    "a dim that is not there": (lambda: tree().sum(2), """\
ShapeError
tdc.sum: expected a dim in [-2, 1], got 2
hint: count dims of the logical shape"""),
    # Found by random calls: a dim in [0, -1] was expected.
    "a dim without batch dims": (lambda: TensorDict({"a": T([1, 2])}).sum(0), """\
ShapeError
tdc.sum: expected at least one dim, got dim 0 of none
hint: x.unsqueeze(0) has one of size 1"""),
    "flatten keys that collide": (lambda: TensorDict({"a": {"b": 1}, "a.b": 2}).flatten_keys(), """\
KeyPathError
tdc.flatten_keys: expected keys that split at '.' as they are joined, got 1 others
at 'a.b'
hint: choose another separator, or td.rename_keys({old: new}) first"""),
    "unflatten keys that collide": (lambda: TensorDict({"a.b": 1, "a": 2}).unflatten_keys(), """\
KeyPathError
tdc.unflatten_keys: expected different keys, got 1 taken twice
at a: a leaf and an inner node
hint: choose another name, or another separator"""),
    "len without batch dims": (lambda: len(TensorDict({"a": T([1, 2])})), """\
DtypeError
tdc.len: expected at least one batch dim, got batch_size=[]
hint: len(td.keys()) counts keys"""),
    "apply that changes sizes": (lambda: tree().apply(torch.sum), """\
ShapeError
tdc.apply: expected leaves of shape [3, 4, ...], got 2 that differ
at tokens: Tensor float32[]
at meta.label: Tensor int64[]
hint: pass batch_size= where fn changes it"""),
    "assign a key": (lambda: tree().__setitem__("tokens", T(1)), """\
ImmutableError
tdc.TensorDict: expected no assignment, TensorDicts are immutable, got td[...] = value
hint: td = td.set('tokens', value)"""),
    "assign a nested key": (lambda: tree().__setitem__(("meta", "label"), T(1)), """\
ImmutableError
tdc.TensorDict: expected no assignment, TensorDicts are immutable, got td[...] = value
hint: td = td.set(('meta', 'label'), value)"""),
    "assign an index": (lambda: tree().__setitem__(slice(1), 0), """\
ImmutableError
tdc.TensorDict: expected no assignment, TensorDicts are immutable, got td[...] = value
hint: td = td.at[index].set(value) for a new one, tdc.copy_(td, value, index) to write into a memory map"""),
    "delete a key": (lambda: tree().__delitem__("tokens"), """\
ImmutableError
tdc.TensorDict: expected no deletion, TensorDicts are immutable, got del td['tokens']
hint: td = td.delete('tokens')"""),
    "assign an attribute": (lambda: setattr(tree(), "batch_size", [3]), """\
ImmutableError
tdc.TensorDict: expected no change in place, instances are immutable, got `x.batch_size = list`
hint: td = td.with_batch_size(sizes)"""),
    "delete an attribute": (lambda: delattr(ragged(), "values"), """\
ImmutableError
tdc.NestedTensor: expected no change in place, instances are immutable, got `del x.values`
hint: x.with_values(values), torch.where(mask, new, x), or tdc.pack(rows)"""),
    "assign a row": (lambda: ragged().__setitem__(0, T(1)), """\
ImmutableError
tdc.NestedTensor: expected no change in place, instances are immutable, got `x[...] = value`
hint: x.with_values(values), torch.where(mask, new, x), or tdc.pack(rows)"""),
    "assign at": (lambda: tree().at.__setitem__(0, 1), """\
ImmutableError
tdc.at: expected no change in place, instances are immutable, got `x[...] = value`
hint: td = td.at[index].set(value)"""),
    "at with a missing key": (lambda: tree().at[0].set({"tokns": 1}), """\
KeyPathError
tdc.at.set: expected an existing key, got 'tokns'
hint: nearest keys: 'tokens'"""),
    "at with a value that does not fit": (lambda: tree().at[0].set(torch.zeros(2)), """\
ShapeError
tdc.at.set: expected a value that broadcasts to [4, 2], got Tensor float32[2]
at tokens: Tensor float32[3, 4, 2]
hint: a tensor or TensorDict spans batch dims; for features give {key: value}"""),
    "at that would drop fractions": (lambda: tree().at[0].add(0.5), """\
DtypeError
tdc.at.add: expected a value that fits torch.int64, got Tensor float32[]
at meta.label: Tensor int64[3, 4]
hint: convert the leaf first: td.set(key, leaf.float())"""),
    "at on a ragged leaf": (lambda: TensorDict({"x": ragged()}, [3]).at[0].set(1), """\
UnsupportedError
tdc.at.set: expected tensor leaves, got another
at x: NestedTensor float32[3, -1, 4]
hint: write into a padded leaf (to_padded), or rebuild it with tdc.pack"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTensorDict(Texts):
    def test_leaves_that_differ_from_the_batch_size(self):
        source = {"a": torch.zeros(3), "b": torch.zeros(4, 2), "c": {"d": T(1), "e": torch.zeros(3, 1)}, "x": ragged(1)}
        self.says(lambda: TensorDict(source, [3]), """\
ShapeError
tdc.TensorDict: expected leaves of shape [3, ...], got 3 that differ
at b: Tensor float32[4, 2]
at c.d: Tensor int64[]
at x: NestedTensor float32[1, -1, 4]
hint: give the batch size all leaves share, reshape the leaf, or Shared(leaf) without batch dims""")  # fmt: skip


class TestCompiled(TestCase):
    """Inside a graph torch keeps the text and loses the class."""

    def says(self, fn: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(TdcError) as eager:
            fn(*args)
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"tdc\.") as compiled:
            torch.compile(fn, fullgraph=True, backend="eager")(*args)
        text = str(compiled.value).replace("\\n", "\n")
        for line in str(eager.value).splitlines():
            assert line in text

    def test_an_op_without_a_rule(self):
        for x in (ragged(), ragged().to_padded(), tree()):
            self.says(lambda x: torch.fft.fft(x), x)

    def test_different_lengths(self):
        self.says(lambda x, y: x + y, ragged(2, 0, 3), ragged(3, 0, 2))
        self.says(lambda x, y: x + y, ragged(2, 0, 3).to_padded(), ragged(3, 0, 2).to_padded())

    def test_different_numbers_of_rows(self):
        self.says(lambda x, y: x + y, ragged(2, 3), ragged(2, 3, 1))

    def test_a_tensor_that_does_not_broadcast(self):
        self.says(lambda x, y: x + y, ragged(), torch.ones(5))
        self.says(lambda x, y: x + y, tree(), torch.ones(3, 4, 2))

    def test_keys(self):
        self.says(lambda td: td["tokns"] + 1, tree())
        self.says(lambda a, b: a + b, tree(), tree().delete("tokens"))

    def test_leaves_that_differ(self):
        self.says(lambda x: TensorDict({"x": x, "y": x[1:]}, [3]), torch.ones(3))

    def test_mutation(self):
        def assign(td: TensorDict) -> TensorDict:
            td["tokens"] = torch.zeros(3, 4)
            return td

        self.says(assign, tree())

    def test_reducing_the_batch_alone(self):
        self.says(lambda x: x.sum(0), ragged())

    def test_an_index_out_of_range(self):
        self.says(lambda x: x[:, :, 4], ragged())
        self.says(lambda td: td[0, 0, 0], tree())
