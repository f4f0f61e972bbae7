"""One buffer and its schema: what comes back, that nothing is copied, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import soak
import torch
from stores import Point, entry, every_kind, put, same, same_bits, sealed, tensors
from texts import T, Texts

import tdc
from tdc import FormatError, TensorDict
from tdc.io import from_buffer, to_buffer
from tdc.io.manifest import DTYPES

POINT = Point(torch.arange(4.0).view(2, 2), batch_size=[2])


def test_everything_comes_back_as_the_memory_of_the_buffer():
    td = every_kind()
    buffer, schema = to_buffer(td)
    back = from_buffer(buffer, schema, classes=[Point])
    assert same(td, back)
    assert type(back["point"]) is Point
    assert back["weight"] is back["tied"]
    assert back["text"].structure is back["labels"].structure
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    for key in back.keys(True, True):
        for x in tensors(back[key]):
            assert x.data_ptr() == 0 or (begin <= x.data_ptr() < end and (x.data_ptr() - begin) % 64 == 0)


def test_the_form_alone_decides_the_schema():
    a, b = every_kind(), every_kind().set("weight", torch.ones(3, 4)).set("tied", torch.ones(3, 4))
    tie = TensorDict({"w": torch.zeros(3)}, [3])
    assert to_buffer(tie)[1] == to_buffer(tie + 1)[1]
    assert to_buffer(a)[1] != to_buffer(b)[1]
    assert to_buffer(a)[0].numel() == to_buffer(a)[0].numel()


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str):
    x = torch.randint(0, 2, (4, 3, DTYPES[name].itemsize), dtype=torch.uint8).view(DTYPES[name]).squeeze(-1)
    td = TensorDict({"odd": torch.ones(3, dtype=torch.uint8), "x": x, "zero": x[:, :0], "one": x[0, 0], "t": x.t()})
    buffer, schema = to_buffer(td)
    back = from_buffer(buffer, schema)
    assert all([same_bits(back[key], td[key]) for key in list(td.keys())])
    assert back["t"].is_contiguous()


def test_keys_that_came_behind_those_of_other_nodes():
    """Found by reading: the buffer had the order in which keys came, the schema that of its nodes."""
    td = TensorDict({"r": {"p": torch.tensor([1, 2])}, "t": torch.tensor([3, 4])}, [2]).set(("r", "b"), T([5, 6]))
    assert same(td, from_buffer(*to_buffer(td)))
    shapes = {"size": tdc.pack([torch.rand(2, 3), torch.rand(1, 2)], ragged_dim=(1, 2)), "w": td["t"]}
    td = TensorDict({"a": {"x": {"y": T([7, 8])}}, "text": tdc.pack([T([1]), T([2, 3])]), "point": POINT}, [2])
    td = td.set(("a", "labels"), td["text"] * 2).set("tied", td["a", "x", "y"]).set(("a", "x", "tied"), td["text"])
    td = td.set(("a", "x", "objects"), tdc.ObjectArray(["u", {"v": 1}])).set(("a", "s"), tdc.Static("here"))
    td = td.set("b", shapes).set(("a", "x", "padded"), td["text"].to_padded()).set(("b", "more"), td["tied"])
    back = from_buffer(*to_buffer(td), classes=[Point])
    assert same(td, back)
    assert back["tied"] is back["a", "x", "y"] is back["b", "more"]
    assert back["a", "labels"].structure is back["text"].structure


def test_keys_in_any_order():
    rng = random.Random(0)
    for _ in range(100):
        paths = [tuple(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(8)]
        paths = [p for i, p in enumerate(paths) if not any([p[: len(q)] == q or q[: len(p)] == p for q in paths[:i]])]
        td = TensorDict({})
        for i, path in enumerate(paths):
            td = td.set(path, torch.full((rng.randint(0, 3),), i, dtype=rng.choice([torch.int64, torch.float64])))
        assert same(td, from_buffer(*to_buffer(td)))


def test_objects_of_one_schema_are_not_shared():
    sent = to_buffer(TensorDict({"o": tdc.ObjectArray([{"a": 1}]), "s": tdc.Static((1, 2))}, [1]))
    first = from_buffer(*sent)
    first["o"].item()["a"] = 2
    assert from_buffer(*sent)["o"].item() == {"a": 1}


def test_nothing_is_a_buffer_too():
    buffer, schema = to_buffer(TensorDict({}, [3]))
    assert buffer.shape == (0,)
    assert from_buffer(buffer, schema).batch_size == (3,)


def test_views_conjugates_and_gradients():
    z = torch.randn(4, dtype=torch.complex64)
    td = TensorDict({"conj": z.conj(), "imag": z.conj().imag, "grad": torch.ones(3, requires_grad=True) * 2})
    back = from_buffer(*to_buffer(td))
    assert torch.equal(back["conj"], z.conj())
    assert torch.equal(back["imag"], -z.imag)
    assert not back["grad"].requires_grad
    before = back["imag"]._version
    back["conj"].add_(1)
    assert back["imag"]._version == before


def test_bytes_from_a_socket():
    td = TensorDict({"x": torch.arange(5.0), "n": torch.arange(5)}, [5])
    buffer, schema = to_buffer(td)
    sent = bytearray(len(schema).to_bytes(64, "little") + buffer.numpy().tobytes() + schema)
    body = torch.frombuffer(sent, dtype=torch.uint8)[64 : 64 + buffer.numel()]
    assert same(td, from_buffer(body, bytes(sent[64 + buffer.numel() :])))


@pytest.mark.parametrize("one", [lambda td: from_buffer(*to_buffer(td)), TensorDict.share_memory])
def test_one_piece_of_memory_in_files(one: Callable[[TensorDict], TensorDict]):
    """torch.save (2.13) takes no memory that several dtypes share; the docs send users to a clone, or a pickle."""
    td, file = one(every_kind()), io.BytesIO()
    with pytest.raises(RuntimeError, match="Cannot save multiple tensors or storages that view the same data"):
        torch.save(td, io.BytesIO())
    torch.save(td.clone(), file)
    file.seek(0)
    for back in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(td)), copy.deepcopy(td)):
        assert same(td, back)


def test_leaves_compile():
    td = from_buffer(*to_buffer(TensorDict({"x": torch.arange(5.0), "y": torch.ones(5)}, [5])))
    out = torch.compile(lambda td: (td["x"] + td["y"]) * 2, fullgraph=True, backend="eager")(td)
    assert torch.equal(out, (torch.arange(5.0) + 1) * 2)


def changed(change: Callable[[Any], Any]) -> bytes:
    """The schema of every kind of leaf, changed by somebody who knows the format."""
    root = json.loads(to_buffer(every_kind())[1])["root"]
    found = change(root)
    return found if isinstance(found, bytes) else sealed(root)


@pytest.mark.parametrize(
    "change",
    [
        put("weight", shape=[3, 10**12]), put("weight", shape=[3, 300]), put("weight", shape=[3, -4]),
        put("weight", dtype="float63"), put("weight", dtype="float64"), put("tied", key=["nothing"]),
        lambda root: entry(root, "text")["offsets"].update(shape=[2**40]), lambda root: b"[" * 100_000,
        lambda root: b"", lambda root: b"\xff\xfe", lambda root: sealed(root, version=2),
        lambda root: json.dumps({"root": root}).encode(),
    ],
)  # fmt: skip
def test_hostile_schemas(change: Callable[[Any], Any]):
    buffer = to_buffer(every_kind())[0]
    with pytest.raises(FormatError, match=r"tdc.io.from_buffer: expected (.|\n)*\nhint: "):
        from_buffer(buffer, changed(change))


def test_hostile_offsets():
    td = TensorDict({"x": tdc.pack([torch.ones(2), torch.ones(3)])}, [2])
    buffer, schema = to_buffer(td)
    buffer[64:].view(torch.int64)[1] = 1 << 40
    with pytest.raises(FormatError, match="at x: jagged with offsets that do not begin with 0"):
        from_buffer(buffer, schema)


@pytest.mark.parametrize("forged", [False, True])
def test_mutated_schemas(forged: bool):
    """Each ends in a FormatError, or in a TensorDict of this buffer; in the right one where the digest tells."""
    td, rng = every_kind(), random.Random(0)
    buffer, schema = to_buffer(td)
    loaded = 0
    for _ in range(300):
        _, data = soak.mutated(schema, json.loads(schema)["root"], rng, forged)
        with suppress(FormatError):
            back = from_buffer(buffer, data, classes=[Point])
            loaded += 1
            assert forged or same(back, td)
    assert loaded < 100


def test_a_buffer_in_memory_that_begins_in_between():
    buffer, schema = to_buffer(TensorDict({"x": torch.arange(3)}, [3]))
    room = bytearray(len(buffer) + 32)
    for skipped in range(1, 8):
        part = torch.frombuffer(memoryview(room)[skipped:], dtype=torch.uint8)
        begin = -part.data_ptr() % 16
        moved = part[begin : begin + len(buffer)].copy_(buffer)
        with pytest.raises(tdc.FormatError, match="a buffer that begins at a multiple of 8"):
            from_buffer(moved, schema)
        assert from_buffer(moved.clone(), schema)["x"].tolist() == [0, 1, 2]


class TestTexts(Texts):
    def test_buffers(self):
        buffer, schema = to_buffer(TensorDict({"x": torch.zeros(3, dtype=torch.float64)}, [3]))
        self.says(lambda: from_buffer(buffer[:32], schema), """\
FormatError
tdc.io.from_buffer: expected a buffer of 64 bytes, got Tensor uint8[32]
hint: the buffer and the schema of one call of tdc.io.to_buffer""")  # fmt: skip
        self.says(lambda: from_buffer(torch.cat([buffer, buffer])[1:65], schema), """\
FormatError
tdc.io.from_buffer: expected a buffer that begins at a multiple of 8, got one that begins in between, or whose bytes \
do not lie side by side
hint: buffer.clone()""")  # fmt: skip
        self.says(lambda: from_buffer(schema, buffer), """\
DtypeError
tdc.io.from_buffer: expected a Tensor, got bytes
hint: torch.as_tensor(x) makes one""")  # fmt: skip
        self.says(lambda: from_buffer(buffer.float(), schema), """\
DtypeError
tdc.io.from_buffer: expected a uint8 tensor, got Tensor float32[64]
hint: buffer.view(torch.uint8), or torch.frombuffer(data, dtype=torch.uint8)""")  # fmt: skip

    def test_what_no_buffer_holds(self):
        td = TensorDict({"s": torch.eye(2).to_sparse(), "o": tdc.Static(object)})
        self.says(lambda: to_buffer(td), """\
UnsupportedError
tdc.io.to_buffer: expected tensors in memory, ragged batches, and Python values that JSON holds, got 2 others
at s: Tensor float32[2, 2], which is no dense tensor of a dtype that files have
at o: Static, which holds type, and JSON does not
hint: td.exclude(key); tdc.from_torch(x) of torch.nested, x.to_dense() of sparse ones, tdc.io.dcp_save for DTensors"""
        )  # fmt: skip
        meta = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})
        with pytest.raises(tdc.UnsupportedError, match="at b: Tensor float32\\[2\\], which has no content"):
            to_buffer(meta)
