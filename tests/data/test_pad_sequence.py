"""pad_sequence, ragged_stack, collate and their inverse: against lists of examples, in eager and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor
from torch.utils.data import DataLoader

import tdc
from tdc import MaskedBatch, NestedTensor, ObjectArray, Static, TensorDict

BOTH = [tdc.data.pad_sequence, tdc.data.ragged_stack]


@tdc.tensorclass
class Clip:
    frames: Tensor
    name: str = "clip"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def examples(*lengths: int) -> list[TensorDict]:
    """Examples without batch dims: two leaves of one length, one without dims, a static value, an empty node."""
    return [
        TensorDict(
            {
                "x": torch.randn(n, 2), "y": torch.tensor(n), "m": {"w": torch.arange(n), "e": {}}, "s": Static("q"),
            }
        )
        for n in lengths
    ]  # fmt: skip


def same(a: TensorDict, b: TensorDict) -> None:
    assert a.batch_size == b.batch_size
    assert set(a.keys(True)) == set(b.keys(True))
    for key in a.keys(True, True):
        x, y = a[key], b[key]
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager")


# -- there and back


@pytest.mark.parametrize("lengths", [(1, 3), (2, 2), (0, 4, 1), (0,), (5,)], ids=str)
@pytest.mark.parametrize("join", BOTH)
def test_examples_come_back(join: Any, lengths: tuple[int, ...]):
    tds = examples(*lengths)
    batch = join(tds)
    kind = MaskedBatch if join is tdc.data.pad_sequence else NestedTensor
    assert batch.batch_size == (len(tds),)
    assert isinstance(batch["x"], kind)  # also where all lengths are equal
    assert isinstance(batch["m", "w"], kind)
    assert batch["x"].lengths.flatten().tolist() == list(lengths)
    assert batch["y"].tolist() == list(lengths)
    assert batch["s"] == "q"
    for a, b in zip(tdc.data.unpad_sequence(batch), tds, strict=True):
        same(a, b)


@pytest.mark.parametrize("join", BOTH)
def test_the_batch_may_be_the_length(join: Any):
    tds = [TensorDict({"x": torch.randn(n, 2), "d": TensorDict({"z": torch.ones(n, 4)}, [n, 4])}, [n]) for n in (1, 3)]
    batch = join(tds)
    assert batch.batch_size == batch["d"].batch_size == (2,)
    rows = tdc.data.unpad_sequence(batch, batch_dims=1)
    assert [row.batch_size for row in rows] == [(1,), (3,)]
    assert all([torch.equal(a["x"], b["x"]) for a, b in zip(rows, tds, strict=True)])


@pytest.mark.parametrize("join", BOTH)
def test_another_dim(join: Any):
    tds = [TensorDict({"x": torch.randn(4, n, 2), "y": torch.randn(4)}, [4]) for n in (1, 3)]
    batch = join(tds, 1)
    assert batch.batch_size == (2, 4)
    assert batch["x"].ragged_dims == (2,)
    assert batch["y"].shape == (2, 4)
    for row, td in zip(batch["x"].unbind(), tds, strict=True):
        assert torch.equal(row, td["x"])


@pytest.mark.parametrize("join", BOTH)
def test_keys_say_which(join: Any):
    tds = [td.set("v", torch.ones(5)) for td in examples(1, 3)]
    assert not isinstance(join(tds)["v"], Tensor)
    batch = join(tds, keys=["x", ("m", "w")])
    assert batch["v"].shape == (2, 5)
    assert not isinstance(batch["x"], Tensor)
    assert isinstance(join(examples(2, 2), keys=[])["x"], Tensor)


def test_one_structure_for_leaves_of_the_same_lengths():
    packed = tdc.data.ragged_stack(examples(1, 3))
    assert packed["x"].structure is packed["m", "w"].structure
    padded = tdc.data.pad_sequence(examples(1, 3))
    assert padded["x"].lengths is padded["m", "w"].lengths
    both = tdc.data.collate(examples(1, 3), pad_keys=["x"], ragged_keys=[("m", "w")])
    assert both["x"].lengths.flatten().tolist() == both["m", "w"].lengths.tolist()


def test_padding_by_key():
    tds = examples(1, 3)
    assert tdc.data.pad_sequence(tds, value=-1)["m", "w"].data.tolist() == [[0, -1, -1], [0, 1, 2]]
    batch = tdc.data.pad_sequence(tds, value={("m", "w"): 7})
    assert batch["m", "w"].data.tolist() == [[0, 7, 7], [0, 1, 2]]
    assert batch["x"].data[0, 1:].tolist() == [[0.0, 0.0]] * 2
    assert tdc.data.pad_sequence([{"x": torch.ones(n)} for n in (1, 2)], value=float("nan"))["x"].data[0].isnan().any()
    flags = [{"f": torch.ones(n, dtype=torch.bool)} for n in (1, 2)]
    assert tdc.data.pad_sequence(flags)["f"].data.tolist() == [[True, False], [True, True]]


def test_padding_by_inner_node():
    tds = [TensorDict({"n": {"x": torch.ones(k), "y": torch.ones(k)}, "z": torch.ones(k)}) for k in (1, 2)]
    batch = tdc.data.pad_sequence(tds, value={("n", "y"): -2.0, "n": -1.0})
    assert [batch[key].data[0, 1].item() for key in (("n", "x"), ("n", "y"), "z")] == [-1.0, -2.0, 0.0]


@pytest.mark.parametrize("key", ["x", "y", "m", ("m", "w"), ("m", "e"), "s"], ids=str)
def test_a_mask_key_replaces_no_data(key: Any):
    with pytest.raises(tdc.KeyPathError, match="expected a mask_key that the examples do not have"):
        tdc.data.pad_sequence(examples(1, 3), mask_key=key)
    beside = tdc.data.pad_sequence(examples(1, 3), mask_key=("m", "mask"))
    assert beside["m", "mask", "x"].tolist() == [[True, False, False], [True] * 3]
    assert beside["m", "w"].lengths.tolist() == [[1], [3]]


@pytest.mark.parametrize("rows", [([1, 2], []), ([], [1, 2])], ids=str)
def test_an_empty_list_has_the_dtype_of_the_others(rows: Any):
    batch = tdc.data.collate([{"a": row, "n": {"b": row}} for row in rows], ragged_keys=["a", ("n", "b")])
    for key in ("a", ("n", "b")):
        assert batch[key].dtype == torch.int64
        assert batch[key].tolist() == list(rows)


def test_like_torch():
    rows = [torch.randn(n, 3) for n in (2, 5, 1)]
    batch = tdc.data.pad_sequence([{"x": row} for row in rows], value=-2.0)
    assert torch.equal(batch["x"].data, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-2.0))


def test_gradients_reach_the_examples():
    rows = [torch.randn(n, requires_grad=True) for n in (2, 3)]
    for join in BOTH:
        grads = torch.autograd.grad(join([{"x": r} for r in rows])["x"].sum(1).sum(), rows)
        assert [g.tolist() for g in grads] == [[1.0] * 2, [1.0] * 3]


def test_classes_stay():
    clips = [Clip(torch.zeros(n, 2)) for n in (1, 3)]
    for join in (*BOTH, partial(tdc.data.collate, ragged_keys=["frames"])):
        batch = join(clips)
        assert type(batch) is Clip
        assert batch.name == "clip"
        assert batch[1].frames.shape == (3, 2)
    pairs = [Pair(torch.zeros(n), torch.tensor(n)) for n in (1, 3)]
    assert tdc.data.ragged_stack(pairs)["x"].shape == (2, -1)


# -- collate


def test_collate_samples_of_a_dataset():
    samples = [{"tokens": torch.arange(n), "label": n, "text": "a" * n, "w": {"p": 0.5, "none": None}} for n in (1, 3)]
    batch = tdc.data.collate(samples, ragged_keys=["tokens"])
    assert batch["tokens"].tolist() == [[0], [0, 1, 2]]
    assert batch["label"].dtype == torch.int64
    assert batch["w", "p"].tolist() == [0.5, 0.5]
    assert batch["text"].tolist() == ["a", "aaa"]
    assert batch["w", "none"].tolist() == [None, None]
    assert tdc.data.collate(samples, pad_keys="tokens", value=-1)["tokens"].data.tolist() == [[0, -1, -1], [0, 1, 2]]


def test_collate_images():
    samples = [{"image": torch.randn(3, h, w), "id": i} for i, (h, w) in enumerate([(2, 3), (4, 1)])]
    batch = tdc.data.collate(samples, ragged_keys={"image": (2, 3)})
    assert batch["image"].shape == (2, 3, -1, -1)
    assert all([torch.equal(a, s["image"]) for a, s in zip(batch["image"].unbind(), samples, strict=True)])
    assert tdc.data.collate(samples, pad_keys={"image": (2, 3)})["image"].shape == (2, 3, 4, 3)


def test_collate_is_stack_where_sizes_agree():
    tds = [TensorDict({"x": torch.randn(4, 2), "o": ObjectArray(list("abcd")), "s": Static(1)}, [4]) for _ in range(3)]
    batch = tdc.data.collate(tds)
    assert batch.batch_size == (3, 4)
    assert torch.equal(batch["x"], torch.stack(tds)["x"])
    assert batch["o"].tolist() == [list("abcd")] * 3
    ragged = [TensorDict({"x": torch.randn(4, n)}, [4]) for n in (1, 2)]
    assert tdc.data.collate(ragged, ragged_keys=["x"])["x"].shape == (2, 4, -1)
    assert tdc.data.collate([{}, {}]).batch_size == (2,)


def test_collate_in_a_data_loader():
    data = [{"tokens": torch.arange(n), "label": n} for n in (1, 3, 2, 5)]
    loader = DataLoader(data, batch_size=2, collate_fn=partial(tdc.data.collate, ragged_keys=["tokens"]))  # type: ignore[arg-type]  # a list is a dataset
    batches = list(loader)
    assert [b["tokens"].lengths.tolist() for b in batches] == [[1, 3], [2, 5]]
    assert [b["label"].tolist() for b in batches] == [[1, 3], [2, 5]]


# -- compiled


@pytest.mark.slow
def test_joins_compile():
    def fn(tds: list[TensorDict]) -> Any:
        return (
            tdc.data.pad_sequence(tds, value={"x": -1.0}) * 2,
            tdc.data.ragged_stack(tds) + 1,
            tdc.data.collate(tds, ragged_keys=["x"], pad_keys=[("m", "w")]),
        )

    tds = examples(1, 3)
    for a, b in zip(compiled(fn)(tds), fn(tds), strict=True):
        assert a.batch_size == b.batch_size
        for x, y in zip(*[torch.utils._pytree.tree_leaves(td) for td in (a, b)], strict=True):
            torch.testing.assert_close(x, y)


# -- padding in front


@pytest.mark.parametrize("lengths", [(1, 3), (2, 2), (0, 4, 1), (0,)], ids=str)
def test_padding_on_the_left(lengths: tuple[int, ...]):
    tds = examples(*lengths)
    batch = tdc.data.pad_sequence(tds, value=-1, side="left", mask_key="mask")
    want = torch.nn.utils.rnn.pad_sequence([td["x"] for td in tds], True, -1, "left")
    assert torch.equal(batch["x"], want)
    places = torch.arange(max(lengths))
    assert batch["mask", "x"].tolist() == [(places >= max(lengths) - n).tolist() for n in lengths]
    assert batch["y"].tolist() == list(lengths)
    assert set(batch["mask"].keys(True, True)) == {"x", ("m", "w")}
    back = tdc.from_padded(batch["x"], mask=batch["mask", "x"], side="left").to_packed()
    assert torch.equal(back.values, torch.cat([td["x"] for td in tds]))


def test_padding_on_the_left_of_another_dim():
    tds = [TensorDict({"x": torch.randn(4, n, 2), "y": torch.randn(4)}, [4]) for n in (1, 3)]
    left = tdc.data.pad_sequence(tds, 1, side="left", mask_key=("masks", "of"))
    right = tdc.data.pad_sequence(tds, 1, mask_key="masks")
    assert torch.equal(left["x"].flip(2)[0, :, :1], tds[0]["x"])
    assert torch.equal(left["x"][1], tds[1]["x"])
    assert (left["masks", "of", "x"].shape, right["masks", "x"].shape) == ((2, 4, 3), (2, 4, 3))
    assert torch.equal(left["masks", "of", "x"].flip(2), right["masks", "x"])


def test_padding_on_the_left_in_a_graph():
    tds = [TensorDict({"x": torch.randn(n, 2)}) for n in (1, 3)]
    got = compiled(partial(tdc.data.pad_sequence, side="left", mask_key="mask"))(tds)
    same(got, tdc.data.pad_sequence(tds, side="left", mask_key="mask"))


# -- what a newcomer types wrong


SAYS: dict[str, Says] = {
    "another side": (lambda: tdc.data.pad_sequence(examples(1, 3), side="top"), """\
ShapeError
tdc.data.pad_sequence: expected side='right' or side='left', got 'top'
hint: the side of the padding"""),
    "padding with words": (lambda: tdc.data.pad_sequence(examples(1, 2), value={"x": "a"}), """\
DtypeError
tdc.data.pad_sequence: expected numbers to pad with, got 1 others
at x: str
hint: value=0.0, or value={'key': -1}"""),
    "padding with words, 2": (lambda: tdc.data.pad_sequence(examples(1, 2), value="a"), """\
DtypeError
tdc.data.pad_sequence: expected numbers to pad with, got 1 others
at value: str
hint: value=0.0, or value={'key': -1}"""),
    "no examples": (lambda: tdc.data.pad_sequence([]), """\
StructureError
tdc.data.pad_sequence: expected at least one example, got an empty list
hint: give one; its keys are those of the batch"""),
    "a batch in place of a list": (lambda: tdc.data.ragged_stack(TensorDict({"x": torch.zeros(2)}, [2])), """\
DtypeError
tdc.data.ragged_stack: expected a list of TensorDicts, got TensorDict [2]
hint: tdc.data.ragged_stack([td0, td1])"""),
    "tensors in place of tensordicts": (lambda: tdc.data.pad_sequence([torch.zeros(2), torch.zeros(3)]), """\
DtypeError
tdc.data.pad_sequence: expected TensorDicts, mappings or records, got 2 others
at example 0: Tensor float32[2]
at example 1: Tensor float32[3]
hint: [{'x': x, 'y': y} for x, y in samples]"""),
    "samples that are tuples": (lambda: tdc.data.collate([(torch.zeros(2), 1), (torch.zeros(3), 2)]), """\
DtypeError
tdc.data.collate: expected TensorDicts, mappings or records, got 2 others
at example 0: tuple
at example 1: tuple
hint: [{'x': x, 'y': y} for x, y in samples]"""),
    "negative dim": (lambda: tdc.data.pad_sequence(examples(1, 3), -1), """\
ShapeError
tdc.data.pad_sequence: expected a dim of at least 0, got -1
hint: dim=0 is the first dim of an example"""),
    "another dim differs": (lambda: tdc.data.pad_sequence(examples(1, 3), 1), """\
ShapeError
tdc.data.pad_sequence: expected examples of equal sizes but for ragged dims, got 2 keys of different sizes
at x: Tensor float32[1, 2] and in example 1 Tensor float32[3, 2]
at m.w: Tensor int64[1] and in example 1 Tensor int64[3]
hint: name keys that differ in keys=, or keep them out of the batch"""),
    "objects of different length": (
        lambda: tdc.data.pad_sequence([{"o": ObjectArray(list("a"))}, {"o": ObjectArray(list("abc"))}]), """\
DtypeError
tdc.data.pad_sequence: expected tensors of one dtype for each key, got 1 keys of other kinds or dtypes
at o: ObjectArray [1], no tensor
hint: convert them with .to(dtype), or td.exclude(key) first"""),
    "sizes that differ in collate": (lambda: tdc.data.collate(examples(1, 3), ragged_keys=["x"]), """\
ShapeError
tdc.data.collate: expected examples of equal sizes but for ragged dims, got 1 keys of different sizes
at m.w: Tensor int64[1] and in example 1 Tensor int64[3]
hint: name keys of different sizes in ragged_keys= or pad_keys="""),
    "a key twice": (lambda: tdc.data.collate(examples(1, 3), ragged_keys=["x"], pad_keys=["x"]), """\
StructureError
tdc.data.collate: expected keys ragged or padded, got 1 that are both
at x
hint: leave it in one of the two"""),
    "a ragged number": (lambda: tdc.data.collate(examples(1, 3), ragged_keys=["x", "y", ("m", "w")]), """\
ShapeError
tdc.data.collate: expected examples of equal sizes but for ragged dims, got 1 keys of different sizes
at y: Tensor int64[] has no dim 0 that could differ
hint: name keys of different sizes in ragged_keys= or pad_keys="""),
    "unknown keys": (lambda: tdc.data.collate(examples(1, 3), ragged_keys=["z"]), """\
KeyPathError
tdc.data.collate: expected an existing key, got 'z'
hint: nearest keys: 'm', 'm.e', 'm.w', 's', 'x'"""),
    "unpad an example": (lambda: tdc.data.unpad_sequence(examples(1)[0]), """\
ShapeError
tdc.data.unpad_sequence: expected a TensorDict with a batch dim, got batch_size=[]
hint: tdc.data.pad_sequence(tds)"""),
    "unpad to dims that differ": (
        lambda: tdc.data.unpad_sequence(tdc.data.pad_sequence(examples(1, 3)), batch_dims=1), """\
ShapeError
tdc.data.unpad_sequence: expected leaves of shape [1, ...], got 1 that differ
at y: Tensor int64[]
hint: give fewer batch_dims"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_other_keys(self):
        a, b = examples(1, 3)
        self.says(lambda: tdc.data.pad_sequence([a, b.delete("y")]), """\
StructureError
tdc.data.pad_sequence: expected TensorDicts with the same keys, got 1 that differ
at y: only in operand 0
hint: select the keys they share first""")  # fmt: skip

    def test_other_static_values(self):
        a, b = examples(1, 3)
        self.says(lambda: tdc.data.collate([a, b.set("s", Static("r"))], ragged_keys=["x", ("m", "w")]), """\
StructureError
tdc.data.collate: expected equal static values, got 1 that differ
at s
hint: ObjectArray for one object per example, or exclude the key""")  # fmt: skip

    def test_other_dtypes(self):
        a, b = examples(1, 3)
        self.says(lambda: tdc.data.ragged_stack([a, b.set("x", b["x"].double())]), """\
DtypeError
tdc.data.ragged_stack: expected tensors of one dtype for each key, got 1 keys of other kinds or dtypes
at x: Tensor float32[1, 2] and in example 1 Tensor float64[3, 2]
hint: convert them with .to(dtype), or td.exclude(key) first""")  # fmt: skip
