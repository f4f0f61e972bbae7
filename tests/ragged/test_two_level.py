"""TwoLevelTensor: what it holds, how it is built, indexed, taken apart and padded, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
from harness import Counter
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from two_levels import LENGTHS, OTHERS, batch, documents, nested, same, same_rows

import tdc
from tdc.ragged import TwoLevelPadded, TwoLevelTensor

INT64 = torch.int64


@pytest.fixture
def docs() -> Any:
    torch.manual_seed(0)
    return documents()


class TestParts:
    def test_shape(self, docs: Any):
        x = batch(docs)
        assert x.shape == torch.Size([4, -1, -1, 4])
        assert (x.ndim, len(x), x.batch_size, x.ragged_dims) == (4, 4, torch.Size([4]), (1, 2))
        assert (x.dtype, x.numel(), x.max_length) == (torch.float64, 60, 3)
        assert x.lengths.tolist() == [2, 0, 3, 1]
        assert x.offsets.tolist() == [0, 2, 2, 5, 6]
        assert x.inner_lengths.tolist() == LENGTHS
        head = "TwoLevelTensor(shape=torch.Size([4, -1, -1, 4]), lengths=[2, 0, 3, 1], inner_lengths="
        assert repr(x).startswith(head)

    def test_sizes_of_ragged_dims_are_no_numbers(self, docs: Any):
        with pytest.raises(tdc.ShapeError, match="one size"):
            range(batch(docs).shape[1])

    def test_values_are_all_sentences(self, docs: Any):
        x = batch(docs)
        same_rows(x.values, [sentence for document in docs for sentence in document])

    def test_with_values_copies_nothing(self, docs: Any):
        x = batch(docs)
        vectors, packed = torch.randn(6, 2), x.values * 2
        assert x.with_values(vectors).values is vectors
        assert x.with_values(vectors).structure is x.structure
        assert x.with_values(packed).values is packed
        same_rows(x.with_values(torch.arange(6)), [torch.tensor(n, dtype=INT64) for n in ([0, 1], [], [2, 3, 4], [5])])

    def test_documents_of_images(self):
        images = [[torch.randn(3, 2, 5), torch.randn(3, 4, 1)], [torch.randn(3, 1, 1)]]
        x = tdc.pack([tdc.pack(document, ragged_dim=(2, 3)) for document in images])
        assert x.shape == torch.Size([2, -1, 3, -1, -1])
        assert_close(x[0][1], images[0][1])
        same_rows(x.mean((3, 4)), [[image.mean((1, 2)) for image in document] for document in images])

    def test_is_immutable(self, docs: Any):
        with pytest.raises(tdc.ImmutableError, match=r"hint: x.with_values\(values\)"):
            setattr(batch(docs), "values", None)  # noqa: B010  # which a type checker would refuse, too

    def test_moves_with_its_structure(self, docs: Any):
        x = batch(docs).to("meta")
        assert x.device == x.offsets.device == x.values.offsets.device == torch.device("meta")
        same(batch(docs).float().to(torch.float64), [[s.float().double() for s in document] for document in docs])


class TestBuild:
    def test_pack_and_unbind_are_inverse(self, docs: Any):
        x = batch(docs)
        same(x, docs)
        same(tdc.pack(x.unbind()), docs)
        assert x.tolist() == [[sentence.tolist() for sentence in document] for document in docs]

    def test_from_offsets(self, docs: Any):
        sentences = tdc.pack([sentence for document in docs for sentence in document])
        same(TwoLevelTensor(sentences, tdc.offsets_of(torch.tensor([2, 0, 3, 1])), max_length=5), docs)

    @pytest.mark.parametrize("lengths", [[[]], [[0]], [[], []], [[0, 0], []], [[3]]])
    def test_little(self, lengths: Any):
        docs = documents(lengths)
        x = batch(docs)
        same(x, docs)
        same_rows(x.flatten(1, 2), [torch.cat([*document, torch.zeros(0, 4).double()]) for document in docs])
        same_rows(x.sum(2), [[sentence.sum(0) for sentence in document] for document in docs])

    def test_an_empty_document_does_not_hide_the_longest(self, docs: Any):
        assert batch(docs).values.structure.extent is not None

    def test_gradients_reach_documents(self, docs: Any):
        leaves = [[sentence.requires_grad_() for sentence in document] for document in docs]
        (batch(leaves).sum(2) ** 2).values.sum().backward()
        for sentence in [sentence for document in leaves for sentence in document]:
            assert_close(sentence.grad, (2 * sentence.sum(0)).expand_as(sentence).detach())

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            (lambda a: tdc.pack([a, torch.ones(2, 4)]), tdc.DtypeError, "rows that are all NestedTensors"),
            (lambda a: tdc.pack([torch.ones(2, 4), a]), tdc.DtypeError, "expected tensors"),
            (lambda a: tdc.pack([a, a.float()]), tdc.ShapeError, "rows like the first"),
            (lambda a: tdc.pack([a, a[..., :2]]), tdc.ShapeError, "rows like the first"),
            (lambda a: tdc.pack([a, a], ragged_dim=2), tdc.ShapeError, "without ragged_dim="),
            (lambda a: tdc.pack([a.transpose(0, 1)]), tdc.ShapeError, "the batch as dim 0"),
            (lambda a: tdc.pack([tdc.pack([a])]), tdc.DtypeError, "expected tensors"),
            (lambda a: TwoLevelTensor(a.values, a.offsets), tdc.DtypeError, "a NestedTensor of values"),
            (lambda a: TwoLevelTensor(a, a.offsets.int()), tdc.DtypeError, "int64 offsets"),
            (lambda a: TwoLevelTensor(a, torch.tensor([1, 1])), tdc.StructureError, "lengths that add up"),
            (lambda a: TwoLevelTensor(a, torch.tensor([0, 2]), max_length=1), tdc.StructureError, "max_length"),
            (lambda a: TwoLevelTensor(a, torch.zeros(1, 1, dtype=INT64)), tdc.ShapeError, r"\(B\+1,\)"),
            (lambda a: tdc.pack([a]).with_values(torch.ones(3)), tdc.ShapeError, "2 inner examples"),
            (lambda a: tdc.pack([a]).with_values(torch.tensor(1)), tdc.ShapeError, "2 inner examples"),
            (lambda a: tdc.pack([a]).with_values([1, 2]), tdc.DtypeError, "a NestedTensor or a tensor"),
            (lambda a: tdc.pack([a]).with_values(a.transpose(0, 1)), tdc.ShapeError, "the batch as dim 0"),
        ],
    )
    def test_refuses(self, call: Any, error: Any, text: str):
        with pytest.raises(error, match=text):
            call(nested(documents()[0]))

    def test_validate_names_what_is_wrong(self, docs: Any):
        sentences = batch(docs).values
        with pytest.raises(tdc.StructureError, match="outer offsets: decrease after row 1"):
            tdc.validate(TwoLevelTensor(sentences, torch.tensor([0, 3, 1, 6])))
        wrong = tdc.NestedTensor(sentences.values, torch.tensor([0, 3, 2, 15]))
        with pytest.raises(tdc.StructureError, match="inner offsets: decrease after row 1"):
            tdc.validate(TwoLevelTensor(wrong, torch.tensor([0, 3])))


INDICES: dict[str, Any] = {
    "slice": slice(1, 3), "step": slice(None, None, 2), "backward": slice(None, None, -1), "rows": [3, 0, 0],
    "tensor": torch.tensor([2, 1]), "mask": torch.tensor([True, False, True, False]), "none": slice(2, 2),
}  # fmt: skip


class TestIndex:
    def test_one_document(self, docs: Any):
        x = batch(docs)
        for i in range(-4, 4):
            same_rows(x[i], docs[i])
        assert x[0].values.untyped_storage().data_ptr() == x.values.values.untyped_storage().data_ptr()
        assert_close(x[2, 0], docs[2][0])
        assert_close(x[2, -1, 1:, 0], docs[2][-1][1:, 0])

    @pytest.mark.parametrize("name", INDICES)
    def test_documents(self, docs: Any, name: str):
        chosen = torch.arange(4)[INDICES[name]] if name != "backward" else torch.arange(4).flip(0)
        same(batch(docs)[INDICES[name]], [docs[i] for i in chosen.tolist()])

    def test_sentences_of_each(self, docs: Any):
        x = batch(docs)
        same(x[:, 1:], [document[1:] for document in docs])
        same(x[:, ::-1], [document[::-1] for document in docs])
        same(x[[0, 2]][:, :2], [docs[0][:2], docs[2][:2]])
        same_rows(x[[0, 2, 3]][:, 0], [docs[0][0], docs[2][0], docs[3][0]])
        same(x[[0, 2]][:, [1, 0]], [[docs[0][1], docs[0][0]], [docs[2][1], docs[2][0]]])
        same_rows(x[[2, 0, 2], [1, 0, 2]], [docs[2][1], docs[0][0], docs[2][2]])

    def test_masks(self, docs: Any):
        x = batch(docs)
        same(x[x.inner_lengths > 1], [[s for s in document if len(s) > 1] for document in docs])
        positive = [[s[s[:, 0] > 0] for s in document] for document in docs]
        same(x[x[..., 0] > 0], positive)

    def test_inside_of_sentences(self, docs: Any):
        x = batch(docs)
        same(x[:, :, 1:], [[s[1:] for s in document] for document in docs])
        same(x[..., 0], [[s[:, 0] for s in document] for document in docs])
        same(x[1:, :, :1, None], [[s[:1, None] for s in document] for document in docs[1:]])
        full = x[x.inner_lengths > 0]
        same_rows(full[:, :, 0], [[s[0] for s in document if len(s)] for document in docs])

    def test_gradients(self, docs: Any):
        leaves = [[sentence.requires_grad_() for sentence in document] for document in docs]
        batch(leaves)[:, 1:].values.square().sum().backward()
        for document in leaves:
            for j, sentence in enumerate(document):
                assert_close(sentence.grad, 2 * sentence.detach() * (j > 0))

    @pytest.mark.parametrize(
        ("index", "error", "text"),
        [
            (4, tdc.IndexingError, "one of 4 rows, got 4"), ((slice(None), 0), tdc.IndexingError, "a shorter row"),
            ((slice(None), None), tdc.IndexingError, "got :, None"), ((..., ...), tdc.IndexingError, "2 times"),
            ("text", tdc.IndexingError, "got str"), (torch.ones(3, dtype=torch.bool), tdc.TdcError, "index"),
            ((0, 0, 0, 0, 0), tdc.TdcError, "index"),
        ],
    )  # fmt: skip
    def test_refuses(self, docs: Any, index: Any, error: Any, text: str):
        with pytest.raises(error, match=text):
            batch(docs)[index]

    def test_masks_of_other_documents(self, docs: Any):
        with pytest.raises(tdc.StructureError):
            batch(docs)[batch(docs[:2] + docs[:2]).inner_lengths > 0]


class TestTrees:
    def test_leaves_and_names(self, docs: Any):
        x: Any = batch(docs)
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]]
        assert paths == [".values.values", ".values.offsets", ".values.extent", ".offsets", ".extent"]
        same(pytree.tree_map(lambda t: t, x), docs)
        same(optree.tree_map(lambda t: t, x), docs)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # optree's stub

    def test_takes_anything_as_a_child(self, docs: Any):
        leaves, spec = pytree.tree_flatten(batch(docs))
        for child in (0, None, "a"):
            repr(pytree.tree_unflatten([child] * len(leaves), spec))

    @pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy", "torch.save"])
    def test_copies(self, docs: Any, way: str, tmp_path: Any):
        x = batch(docs)
        if way == "torch.save":
            torch.save(x, tmp_path / "x")
            same(torch.load(tmp_path / "x", weights_only=True), docs)
        else:
            ways = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}
            same(ways[way](x), docs)


class TestInTensorDicts:
    def test_documents_of_a_batch(self, docs: Any):
        td: Any = tdc.TensorDict({"text": batch(docs), "label": torch.arange(4)}, [4])
        same(td[[2, 0]]["text"], [docs[2], docs[0]])
        same_rows(td[2]["text"], docs[2])
        joined: Any = torch.cat([td, td[:1]])
        same(joined["text"], [*docs, docs[0]])
        same([*td.split(3)][1]["text"], docs[3:])
        same((td * 2)["text"], [[2 * s for s in document] for document in docs])
        assert td.to(torch.float32)["text"].dtype == torch.float32
        assert tdc.nbytes(td["text"]) == 60 * 8 + 7 * 8 + 5 * 8

    def test_batch_dims_are_dim_0_alone(self, docs: Any):
        td = tdc.TensorDict({"text": batch(docs)}, [4])
        with pytest.raises(tdc.UnsupportedError, match="unsqueeze"):
            td.unsqueeze(0)
        with pytest.raises(tdc.ShapeError, match="dims of inner examples"):
            td.sum(0)


# -- rectangles


NAN = float("nan")


def images() -> Any:
    """Documents of images: two ragged dims each."""
    first = tdc.pack([torch.rand(2, 3), torch.rand(1, 4)], ragged_dim=(1, 2))
    return tdc.pack([first, tdc.pack([torch.rand(3, 3)], ragged_dim=(1, 2)), first[:0]])


@pytest.mark.parametrize("lengths", [LENGTHS, *OTHERS, [[], []], [[0, 0], [0]]])
def test_a_rectangle_and_back(lengths: list[list[int]]):
    docs = documents(lengths)
    x = batch(docs)
    padded = x.to_padded(NAN)
    count, length = max(map(len, lengths)), max([n for document in lengths for n in document], default=0)
    assert padded.data.shape == (len(lengths), count, length, 4)
    assert torch.equal(padded.mask, ~padded.data[..., :1].isnan())
    assert padded.lengths.tolist() == [len(document) for document in lengths]
    assert padded.inner_mask.sum(1).tolist() == padded.lengths.tolist()
    for row, document in zip(padded.data, docs, strict=True):
        for sentence, s in zip(row, document, strict=False):
            assert torch.equal(sentence[: len(s)], s)
    same(padded.to_packed(), docs)
    same(tdc.nested_like(padded.data, x), docs)


def test_images():
    x = images()
    padded = x.to_padded(NAN)
    assert padded.data.shape == (3, 2, 3, 4)
    assert padded.inner_lengths.tolist() == [[[2, 3], [1, 4]], [[3, 3], [0, 0]], [[0, 0], [0, 0]]]
    assert torch.equal(padded.mask, ~padded.data.isnan())
    tdc.testing.assert_close(padded.to_packed(), x)
    tdc.testing.assert_close(tdc.nested_like(padded.data, x), x)


def test_what_is_longer_is_cut():
    docs = documents()
    with pytest.warns(UserWarning, match="so that it is cut"):
        cut = batch(docs).to_padded(length=(2, 3))
    assert cut.data.shape == (4, 2, 3, 4)
    same(cut.to_packed(), [[s[:3] for s in document[:2]] for document in docs])
    wide = batch(docs).to_padded(1.0, length=(4, 6))
    assert wide.data.shape == (4, 4, 6, 4)
    assert (wide.data.masked_fill(wide.mask, 1) == 1).all()
    same(wide.to_packed(), docs)


def test_lengths_of_others_may_count_padding():
    """What a program says of sentences that are not there makes no difference."""
    padded = TwoLevelPadded(torch.rand(2, 2, 3), torch.tensor([1, 2]), torch.tensor([[2, 3], [1, 3]]))
    assert padded.to_packed().inner_lengths.tolist() == [[2], [1, 3]]
    assert padded.mask.sum((1, 2)).tolist() == [2, 4]


@pytest.mark.slow
def test_one_graph_with_gradients():
    def run(x: Any) -> Any:
        padded = x.to_padded(NAN)
        return tdc.nested_like(torch.where(padded.mask, padded.data * 2, 0), x), padded.to_packed(), padded

    counter = Counter("aot_eager")
    graph = torch.compile(run, fullgraph=True, backend=counter)
    for lengths in (LENGTHS, *OTHERS):
        x = batch(documents(lengths)).requires_grad_()
        doubled, back, padded = graph(x)
        for got, want in zip(padded, x.to_padded(), strict=True):
            assert torch.equal(got.nan_to_num() if got.is_floating_point() else got, want)
        assert torch.equal(doubled.values.values, 2 * x.values.values)
        assert torch.equal(back.values.values, x.values.values)
        (doubled.sum() + 3 * back.sum()).backward()
        assert x.grad is not None
        assert (x.grad.values.values == 5).all()
    assert counter.graphs == 1


def test_what_is_refused():
    data, lengths, sizes = batch(documents()).to_padded()
    for parts, error, text in (
        ((data, lengths, sizes.float()), tdc.DtypeError, "int64 lengths"),
        ((data, lengths[:2], sizes), tdc.ShapeError, "inner_lengths"),
        ((data, lengths, sizes[:, :1]), tdc.ShapeError, "inner_lengths"),
        ((data[:, :, 0, 0], lengths, sizes), tdc.ShapeError, "inner_lengths"),
        ((data, lengths, [[1]]), tdc.DtypeError, "inner_lengths"),
    ):
        with pytest.raises(error, match=text):
            TwoLevelPadded(*parts).to_packed()  # type: ignore[arg-type]  # wrong kinds on purpose
    x: Any = batch(documents())
    for rectangle in (data[:3], data[:, :1], data[:, :, :2]):
        with pytest.raises(tdc.TdcError):
            tdc.nested_like(rectangle, x)
    with pytest.raises(tdc.ShapeError, match="length with 2 sizes"):
        x.to_padded(length=3)


def test_attention_of_two_levels_is_refused_by_its_name():
    x = tdc.pack([tdc.pack([torch.ones(2, 4)]), tdc.pack([torch.ones(1, 4), torch.ones(3, 4)])])
    for layer in (nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8).eval()):
        given = (x,) * 3 if isinstance(layer, nn.MultiheadAttention) else (x,)
        with pytest.raises(tdc.UnsupportedError, match=r"multi_head_attention_forward: .*\nhint: .*x.with_values\("):
            layer(*given)
