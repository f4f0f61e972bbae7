"""Arrow's tables, Parquet files and data sets of Hugging Face as TensorDicts and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from texts import Texts

import tdc
from tdc import MaskedBatch, NestedTensor, ObjectArray, Static, TensorDict
from tdc.data import from_arrow, from_parquet, to_arrow, to_dataset, to_parquet

pa: Any = pytest.importorskip("pyarrow")
NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
WRONG: dict[str, Any] = {
    "list": [1], "dict": {"a": 1}, "None": None, "tensor": torch.zeros(3), "array": np.zeros(3), "str": "a", "int": 3,
}  # fmt: skip


def address(array: Any) -> int:
    """Where the values of an array lie."""
    return array.buffers()[-1].address


def mixed() -> TensorDict:
    text = tdc.pack([torch.arange(2), torch.arange(0), torch.arange(3)])
    return TensorDict(
        {
            "x": torch.rand(3), "m": torch.rand(3, 2, 4), "ok": torch.tensor([True, False, True]), "text": text,
            "labels": text + 1, "features": tdc.pack([torch.rand(2, 5), torch.rand(0, 5), torch.rand(1, 5)]),
            "name": ObjectArray(["a", "b", None]), "meta": {"id": torch.arange(3), "deep": {"y": torch.rand(3)}},
        },
        [3],
    )  # fmt: skip


def check_equal(a: TensorDict, b: TensorDict) -> None:
    """Equal in keys, dtypes and content."""
    assert a.batch_size == b.batch_size
    assert a.keys(True, True) == b.keys(True, True)
    for key in a.keys(True, True):
        x, y = a[key], b[key]
        if isinstance(x, ObjectArray):
            assert x.tolist() == y.tolist()
            continue
        if isinstance(x, NestedTensor):
            assert isinstance(y, NestedTensor)
            assert torch.equal(x.offsets, y.offsets)
            assert x.max_seqlen == y.max_seqlen
            x, y = x.values, y.values
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


# -- from a table


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_taken_where_they_lie(name: str):
    array = pa.array(np.arange(5).astype(name))
    td = from_arrow(pa.table({"x": array, "s": array}).slice(1, 3))
    assert td["x"].dtype == getattr(torch, name)
    assert td["x"].tolist() == [1, 2, 3]
    assert td["x"].data_ptr() == address(array) + np.dtype(name).itemsize
    assert from_arrow(pa.table({"x": array}), copy=True)["x"].data_ptr() != address(array)


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_lists_are_ragged(make: Any):
    rows = [[9, 9], [1, 2], [], [3], [7]]
    array = pa.array(rows, make(pa.int32()))
    x = from_arrow(pa.table({"x": array}))["x"]
    assert x.tolist() == rows
    assert x.values.data_ptr() == address(array)
    assert (x.offsets.data_ptr() == array.buffers()[1].address) == (make is pa.large_list)
    part = from_arrow(pa.table({"x": array}).slice(1, 3))["x"]
    assert part.tolist() == rows[1:4]
    assert part.offsets.tolist() == [0, 2, 2, 3]
    assert part.to_padded().data.shape == (3, 2)
    assert from_arrow(pa.table({"x": array}).slice(2, 0))["x"].tolist() == []
    assert from_arrow(pa.table({"x": pa.array([], make(pa.int8()))}))["x"].shape == (0, -1)


def test_columns_of_equal_lengths_share_a_structure():
    table = pa.table({"ids": [[1, 2], [3]], "mask": [[1, 1], [1]], "other": [[1], [2]]})
    td = from_arrow(table)
    assert td["ids"].structure is td["mask"].structure
    assert td["ids"].structure is not td["other"].structure
    assert (td["ids"] * td["mask"]).tolist() == [[1, 2], [3]]


def test_several_chunks_dictionaries_structs_and_fixed_lists():
    chunks = pa.chunked_array([[1, 2], [3], []], pa.int64())
    fixed = pa.array([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], pa.list_(pa.list_(pa.float32(), 2), 1))
    struct = pa.array([{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}, {"a": 3, "b": {"c": "z"}}])
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    codes = pa.array([5, 6, 5]).dictionary_encode()
    ragged = pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int8(), 2)))
    td = from_arrow(pa.table({"n": chunks, "f": fixed, "s": struct, "w": words, "c": codes, "r": ragged}).slice(1))
    assert td["n"].tolist() == [2, 3]
    assert td["f"].tolist() == [[[3.0, 4.0]], [[5.0, 6.0]]]
    assert td["f"].data_ptr() == address(fixed) + 8
    assert td["s", "a"].tolist() == [2, 3]
    assert td["s", "b", "c"].tolist() == ["y", "z"]
    assert td["w"].tolist() == ["b", "a"]
    assert td["c"].tolist() == [6, 5]
    assert td["r"].tolist() == [[], [[3, 4], [5, 6]]]
    assert td["r"].shape == (2, -1, 2)


def test_fixed_shapes_with_a_permutation():
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    rows = pa.array([list(range(6)), list(range(6, 12))], pa.list_(pa.int32(), 6))
    x = pa.ExtensionArray.from_storage(kind, rows)
    lists = pa.ListArray.from_arrays([0, 1, 2], x)
    td = from_arrow(pa.table({"x": x, "lists": lists}))
    assert td["x"].tolist() == x.to_numpy_ndarray().tolist()
    assert [row[0] for row in td["lists"].tolist()] == td["x"].tolist()


def test_fields_of_one_name_are_refused():
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(tdc.UnsupportedError, match="at s: struct<a: int64, a: int64>, where fields have one name"):
        from_arrow(pa.table({"s": twice}))


@pytest.mark.parametrize("wrong", [2**70, "\ud800", object()], ids=["int", "surrogate", "object"])
def test_objects_that_arrow_has_no_type_for(wrong: Any):
    with pytest.raises(tdc.UnsupportedError, match=r"at o: ObjectArray \[1\]: "):
        to_arrow(TensorDict({"o": ObjectArray([wrong])}, [1]))


def test_texts_bytes_and_lists_of_records_are_objects():
    messages = [[{"role": "user", "content": "hi"}], []]
    td = from_arrow(pa.table({"m": messages, "b": [b"x", None], "t": [["a", "b"], None], "l": pa.array(["x", "y"])}))
    assert td["m"].tolist() == messages
    assert td["b"].tolist() == [b"x", None]
    assert td["t"].tolist() == [["a", "b"], None]


@pytest.mark.parametrize("objects", [[], [None, None]], ids=str)
def test_objects_that_say_no_type(objects: list[Any], tmp_path: Path):
    td = TensorDict({"name": ObjectArray(objects), "x": torch.zeros(len(objects))}, [len(objects)])
    to_parquet(td, tmp_path / "a.parquet")
    for back in (from_arrow(to_arrow(td)), from_parquet(tmp_path / "a.parquet")):
        assert isinstance(back["name"], ObjectArray)
        assert back["name"].tolist() == objects


def test_record_batches_columns_and_no_rows():
    batch = pa.record_batch({"a": [1, 2], "b": [3, 4]})
    assert from_arrow(batch, columns=["b"]).keys() == ("b",)
    assert from_arrow(pa.table({"a": pa.chunked_array([], pa.int64())}))["a"].shape == (0,)
    assert from_arrow(pa.table({"l": pa.chunked_array([], pa.list_(pa.int64()))}))["l"].shape == (0, -1)


# -- there and back


def test_tables_there_and_back():
    td = mixed()
    table = to_arrow(td)
    back = from_arrow(table)
    check_equal(td, back)
    assert back["text"].structure is back["labels"].structure
    assert address(table["x"].chunk(0)) == td["x"].data_ptr()
    assert address(table["text"].chunk(0)) == td["text"].values.data_ptr()
    check_equal(td[1:], from_arrow(table.slice(1)))
    check_equal(td[[0, 2]], from_arrow(to_arrow(td[[0, 2]])))


def test_padded_batches_views_gradients_and_several_batch_dims():
    padded = MaskedBatch(torch.arange(6.0).view(2, 3), torch.tensor([1, 3]))
    td = TensorDict({"p": padded, "g": torch.ones(2, requires_grad=True) * 2, "t": torch.rand(3, 2).t()}, [2])
    back = from_arrow(to_arrow(td))
    assert back["p"].tolist() == [[0.0], [3.0, 4.0, 5.0]]
    assert back["g"].tolist() == [2.0, 2.0]
    assert torch.equal(back["t"], td["t"])
    wide = TensorDict({"x": torch.rand(2, 3), "o": ObjectArray(list("abcdef"), [2, 3])}, [2, 3])
    assert to_arrow(wide)["o"].to_pylist() == [["a", "b", "c"], ["d", "e", "f"]]
    assert from_arrow(to_arrow(wide)).batch_size == (2,)
    assert to_arrow(TensorDict({}, [4])).num_rows in (0, 4)
    assert set(from_arrow(to_arrow(TensorDict({"n": {}, "x": torch.ones(2)}, [2]))).keys()) == {"n", "x"}


def test_parquet_there_and_back(tmp_path: Path):
    td, path = mixed(), tmp_path / "a.parquet"
    to_parquet(td, path)
    check_equal(td, from_parquet(path))
    assert from_parquet(str(path), columns=["labels", "x"]).keys() == ("labels", "x")
    to_parquet(td[:2], path, overwrite=True)
    check_equal(td[:2], from_parquet(path))
    assert os.listdir(tmp_path) == ["a.parquet"]
    to_parquet(td[2:], tmp_path / "b.parquet")
    check_equal(td, from_parquet(tmp_path))


def test_parquet_of_other_programs(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": list(range(1000)), "l": [[i] * (i % 3) for i in range(1000)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    td = from_parquet(tmp_path / "a.parquet")
    assert td["x"].tolist() == list(range(1000))
    assert td["l"].tolist() == table["l"].to_pylist()


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    td = TensorDict({"n": {"e": {}}, "x": torch.ones(2)}, [2])
    with pytest.raises(tdc.UnsupportedError, match=r"tdc.data.to_parquet: expected what Parquet holds.*\nhint: "):
        to_parquet(td, tmp_path / "a.parquet")
    with pytest.raises(FileNotFoundError):
        to_parquet(TensorDict({"x": torch.ones(2)}, [2]), tmp_path / "no" / "a.parquet")
    assert os.listdir(tmp_path) == []


# -- Hugging Face


def test_what_parquet_files_would_lose(tmp_path: Path):
    with pytest.raises(tdc.UnsupportedError, match="no leaves, whose number of rows would be lost"):
        to_parquet(TensorDict({}, [2]), tmp_path / "a.parquet")
    with pytest.raises(tdc.FormatError, match="expected a Parquet file, got a folder without any at"):
        from_parquet(tmp_path)


def test_data_sets_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "ids": datasets.Sequence(datasets.Value("int32")), "label": datasets.ClassLabel(names=["no", "yes"]),
        "image": datasets.Array2D((2, 3), "float32"), "pair": datasets.Sequence(datasets.Value("int64"), length=2),
        "text": datasets.Value("string"),
    })  # fmt: skip
    rows = {
        "ids": [[1, 2], [], [3]], "label": [0, 1, 1], "image": [[[i, 1, 2], [3, 4, 5]] for i in range(3)],
        "pair": [[1, 2], [3, 4], [5, 6]], "text": ["a", "b", "c"],
    }  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=features)
    td = from_arrow(data)
    assert td["ids"].tolist() == rows["ids"]
    assert td["image"].shape == (3, 2, 3)
    assert td["image"][:, 0, 0].tolist() == [0, 1, 2]
    assert td["pair"].tolist() == rows["pair"]
    assert td["label"].data_ptr() == address(data.data.table["label"].chunk(0))
    turned = from_arrow(data.select([2, 0]), columns=["text", "ids"])
    assert turned["text"].tolist() == ["c", "a"]
    assert turned["ids"].tolist() == [[3], [1, 2]]
    back = to_dataset(mixed())
    assert back[0]["text"] == [0, 1]
    check_equal(mixed().exclude("x", "m", "features", "meta"), from_arrow(back).exclude("x", "m", "features", "meta"))
    with pytest.raises(tdc.DtypeError, match=r"expected one data set, got splits train\nhint: dataset\['train'\]"):
        from_arrow(datasets.DatasetDict({"train": data}))


# -- what is refused


class TestTexts(Texts):
    def test_columns(self):
        table = pa.table({
            "n": [1, None, 2], "l": [[1], None, [2]], "i": [[1, None], [], []], "s": [{"a": 1}, {"a": None}, {"a": 2}],
            "when": pa.array([1, 2, 3], pa.timestamp("s")), "ll": [[[1], [2, 3]], [], [[4]]],
            "f": pa.array([[1, 2], [None, 3], [4, 5]], pa.list_(pa.int64(), 2)), "none": pa.nulls(3),
        })  # fmt: skip
        self.says(lambda: from_arrow(table), """\
UnsupportedError
tdc.data.from_arrow: expected columns that tensors can hold, got 8 others
at n: int64 with 1 nulls
at l: list<item: int64> with 1 nulls
at i: a list of int64 with 1 nulls
at s.a: int64 with 1 nulls
at when: timestamp[s]
at ll: a list of list<item: int64>
at f: fixed_size_list<item: int64>[2] with 1 nulls
at none: null with 3 nulls
hint: table.drop_null() or fill_null(value) of nulls, column.cast(type) of other types, or columns=[...]"""
        )  # fmt: skip
        self.says(lambda: from_arrow(table, columns=["x", "n"]), """\
KeyPathError
tdc.data.from_arrow: expected columns of the table, got 'x'
hint: columns: n, l, i, s, when, ll, f, none""")  # fmt: skip
        self.says(lambda: from_arrow(table, columns="n"), """\
KeyPathError
tdc.data.from_arrow: expected a list of columns, got 'n'
hint: columns=['a', 'b']""")  # fmt: skip
        self.says(lambda: from_arrow({"a": [1]}), """\
DtypeError
tdc.data.from_arrow: expected a table of Arrow, got dict
hint: pyarrow.table(columns), or a datasets.Dataset; tdc.TensorDict takes a dict of arrays""")  # fmt: skip

    def test_leaves(self):
        images = tdc.pack([torch.rand(2, 3), torch.rand(4, 2)], ragged_dim=(1, 2))
        td = TensorDict(
            {
                "b": torch.ones(2).bfloat16(), "c": torch.ones(2, dtype=torch.complex64), "images": images,
                "s": Static("a"), "o": ObjectArray([object(), object()]), "none": torch.ones(2, 0),
            },
            [2],
        )  # fmt: skip
        with pytest.raises(tdc.UnsupportedError) as caught:
            to_arrow(TensorDict({"n": td}, [2]))
        lines = str(caught.value).splitlines()
        assert lines[0] == "tdc.data.to_arrow: expected leaves that Arrow has a type for, got 6 others"
        assert [line.partition(":")[0] for line in lines[1:-1]] == [f"at n.{key}" for key in td.keys(sort=False)]
        self.says(lambda: to_arrow(td[0]), """\
ShapeError
tdc.data.to_arrow: expected a TensorDict with a batch dim, got batch_size=[]
hint: batch_size=[n], of the rows of the table; td.unsqueeze(0) for one row""")  # fmt: skip

    def test_files(self):
        with pytest.raises(
            tdc.FormatError, match=r"tdc.data.from_parquet: expected a Parquet file, got (.|\n)*\nhint: "
        ):
            from_parquet(__file__)
        with pytest.raises(tdc.FormatError, match=r"tdc.data.to_parquet: expected a path where nothing is"):
            to_parquet(TensorDict({"x": torch.ones(2)}, [2]), __file__)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_kinds(kind: str, tmp_path: Path):
    wrong, path, td = WRONG[kind], tmp_path / "a.parquet", TensorDict({"x": torch.ones(2)}, [2])
    to_parquet(td, path)
    table = to_arrow(td)
    calls: list[Any] = [
        lambda: from_arrow(wrong), lambda: to_arrow(wrong), lambda: to_parquet(wrong, path, overwrite=True),
        lambda: from_arrow(table, copy=wrong), lambda: to_parquet(td, path, overwrite=wrong),
        *([] if kind in ("str",) else [lambda: from_parquet(wrong), lambda: to_parquet(td, wrong)]),
        *([] if kind == "None" else [lambda: from_parquet(path, columns=wrong)]),
        *([] if kind == "None" else [lambda: from_arrow(table, columns=wrong)]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(tdc.TdcError, match=r"tdc\.data\.\w+: expected .*, got .*\n(.|\n)*hint: .+"):
            call()
