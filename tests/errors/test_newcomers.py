"""What a newcomer types at a batch: each call raises an error of ours that names the spelling to use."""

from __future__ import annotations

import copy
import operator
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from texts import refused
from torch import nn

import tdc

lib: Any = tdc
Call = Callable[[Any], Any]
ROWS = [torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4)]
BATCHES: dict[str, Any] = {"nested": tdc.pack(ROWS), "masked": tdc.pack(ROWS).to_padded()}
NUMBERS: dict[str, Any] = {kind: x[:, :, 0] for kind, x in BATCHES.items()}
IDS: dict[str, Any] = {kind: x.long() % 4 for kind, x in NUMBERS.items()}
TD: Any = tdc.TensorDict({"x": torch.zeros(3, 2), "n": {"y": torch.zeros(3)}}, [3])
DENSE, LENGTHS = torch.rand(2, 5), torch.tensor([2, 3])
TABLE: Any = torch.rand(5, 4)
pack_padded: Any = nn.utils.rnn.pack_padded_sequence


def put_at(table: Any, index: Any) -> Any:
    table[index] = 0
    return table


def put(x: Any, name: str, value: Any) -> None:
    setattr(x, name, value)


def jagged() -> Any:
    return torch.nested.nested_tensor(ROWS, layout=torch.jagged)


def encoder(training: bool) -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1).train(training)


def step() -> Any:
    return tdc.compile.train_step(nn.Linear(2, 1), lambda net, x: net(x).sum(), tdc.optim.sgd(0.1), compile=False)


def holder(x: Any) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", x)
    return module


RAGGED: dict[str, tuple[Call, type[tdc.TdcError], str]] = {
    "x.backward()": (lambda x: x.backward(), tdc.UnsupportedError, "x.sum().backward()"),
    "x.item()": (lambda x: x.item(), tdc.UnsupportedError, "x.sum().item()"),
    "x.T": (lambda x: x.T, tdc.UnsupportedError, "x.mT"),
    "x.H": (lambda x: x.H, tdc.UnsupportedError, "x.mH"),
    "x.length": (lambda x: x.length, tdc.UnsupportedError, "x.lengths"),
    "x.register_hook(f)": (lambda x: x.register_hook(print), tdc.UnsupportedError, ".register_hook(fn)"),
    "x * lengths": (lambda x: x * LENGTHS, tdc.ShapeError, "y.view(-1, 1, 1)"),
    "x.repeat(1, 2, 1)": (lambda x: x.repeat(1, 2, 1), tdc.ShapeError, "torch.cat([x"),
    "x.requires_grad = True": (lambda x: put(x, "requires_grad", True), tdc.ImmutableError, "x.requires_grad_()"),
    "x.lengths = t": (lambda x: put(x, "lengths", LENGTHS), tdc.ImmutableError, "lengths)"),
    "np.asarray(x)": (np.asarray, tdc.DtypeError, "x.to_padded().filled(0)"),
    "np.stack([x, x])": (lambda x: np.stack([x, x]), tdc.DtypeError, "row.numpy()"),
    "pack_padded_sequence(x)": (
        lambda x: pack_padded(x, LENGTHS, batch_first=False), tdc.UnsupportedError, "batch_first=True"
    ),
    "autograd.grad(loss, x)": (lambda x: torch.autograd.grad(x.sum(), x), tdc.CallError, "outputs that require grad"),
    "dense.copy_(x)": (lambda x: torch.zeros(2, 3, 4).copy_(x), tdc.UnsupportedError, "filled(0)"),
    "torch.cat(x)": (lambda x: torch.cat(x), tdc.DtypeError, "torch.cat([x, y])"),
    "torch.stack(x)": (lambda x: torch.stack(x), tdc.DtypeError, "torch.stack([x, y])"),
    "x + dict": (lambda x: x + {"x": 1}, tdc.DtypeError, "tdc.as_tensordict(d)"),
    "[1] * x": (lambda x: [1.0] * x, tdc.DtypeError, "torch.tensor(x)"),
    "x - None": (lambda x: x - None, tdc.DtypeError, "a number, a tensor or a batch"),
    "x.new = 3": (lambda x: put(x, "new", 3), tdc.ImmutableError, "torch.where(mask, new, x)"),
    "x * jagged": (lambda x: x * jagged(), tdc.DtypeError, "tdc.from_torch(y)"),
    "jagged * x": (lambda x: jagged() * x, tdc.DtypeError, "tdc.from_torch(y)"),
    "torch.cat([x, jagged])": (lambda x: torch.cat([x, jagged()]), tdc.DtypeError, "tdc.from_torch(y)"),
    "F.mse_loss(x, jagged)": (lambda x: F.mse_loss(x, jagged()), tdc.DtypeError, "tdc.from_torch(y)"),
    "Normal(x, 1.0)": (
        lambda x: torch.distributions.Normal(x, 1.0, validate_args=True), tdc.UnsupportedError,
        "tdc.ops.distribution(Normal, x, 1.0)",
    ),
    "encoder(x, src_key_padding_mask=m)": (
        lambda x: encoder(False)(x, src_key_padding_mask=DENSE[:, :3] > 0), tdc.UnsupportedError,
        "leave src_key_padding_mask out",
    ),
    "encoder in training": (
        lambda x: encoder(True)(x, src_key_padding_mask=DENSE[:, :3] > 0), tdc.UnsupportedError, "key_padding_mask out"
    ),
    "load_state_dict of a buffer": (
        lambda x: holder(x).load_state_dict(holder(x).state_dict()), tdc.UnsupportedError, "registers the tensors"
    ),
    "dense.add_(x)": (lambda x: torch.zeros(2, 3, 4).add_(x), tdc.UnsupportedError, "torch.add(...)"),
}  # fmt: skip
INDICES: dict[str, tuple[Call, type[tdc.TdcError], str]] = {
    "F.cross_entropy(dense, x)": (
        lambda x: F.cross_entropy(torch.rand(2, 3, 5), x), tdc.StructureError, "logits = target.with_"
    ),
    "F.nll_loss(dense, x)": (lambda x: F.nll_loss(torch.rand(2, 3, 5), x), tdc.StructureError, "logits = target.with_"),
    "index_add(dense, 0, x, x)": (lambda x: torch.index_add(DENSE, 0, x, x), tdc.StructureError, "x.with_"),
    "index_select(dense, 0, x)": (lambda x: torch.index_select(TABLE, 0, x), tdc.ShapeError, "F.embedding(ids, table)"),
    "bilinear(dense, dense, x)": (lambda x: F.bilinear(DENSE, DENSE, x), tdc.StructureError, "x.with_"),
    "table[x] = 0": (lambda x: operator.setitem(TABLE, (x,), 0), tdc.UnsupportedError, "table[ids.values] = v.values"),
    "table[x, 0]": (lambda x: TABLE[x, 0], tdc.UnsupportedError, "F.embedding(ids, table)"),
    "td[x]": (lambda x: TD[x], tdc.IndexingError, "F.embedding(ids, table)"),
}  # fmt: skip
VALUES, T = torch.rand(5, 4), torch.rand(2, 3, 4)
OTHERS: dict[str, tuple[Callable[[], Any], type[tdc.TdcError], str]] = {
    "td.batch_size = ": (lambda: put(TD, "batch_size", [3]), tdc.ImmutableError, "td = td.with_batch_size(sizes)"),
    "td.device = ": (lambda: put(TD, "device", "cpu"), tdc.ImmutableError, "td = td.with_device(device)"),
    "td.new = 3": (lambda: put(TD, "new", 3), tdc.ImmutableError, "td = td.set(key, value)"),
    "td + dict": (lambda: TD + {"x": 1}, tdc.DtypeError, "tdc.as_tensordict(d)"),
    "np.asarray(td)": (lambda: np.asarray(TD), tdc.DtypeError, "td['key'].numpy(), or tdc.interop.to_struct_array(td)"),
    "np.stack([td, td])": (lambda: np.stack([TD, TD]), tdc.DtypeError, "td['key'].numpy()"),
    "np.asarray(shared)": (lambda: np.asarray(tdc.Shared(VALUES)), tdc.DtypeError, "x.value.numpy()"),
    "tdc.pack([td])": (lambda: lib.pack([TD]), tdc.DtypeError, "torch.as_tensor(row)"),
    "tdc.from_numpy([td])": (lambda: lib.from_numpy([TD]), tdc.DtypeError, "expected numpy arrays"),
    "td['n.y']": (lambda: TD["n.y"], tdc.KeyPathError, "td['n', 'y']"),
    "td[['x', 'n']]": (lambda: TD[["x", "n"]], tdc.IndexingError, "td.select('x', 'n')"),
    "tdc.from_list([[None]])": (lambda: lib.from_list([[None]]), tdc.DtypeError, "numbers first, as a tokenizer does"),
    "tdc.from_list of dicts": (lambda: lib.from_list([[{"a": 1}]]), tdc.DtypeError, "as a tokenizer does"),
    "tdc.from_list([[300]], dtype=torch.int8)": (
        lambda: lib.from_list([[300]], dtype=torch.int8), tdc.DtypeError, "without overflow"
    ),
    "tdc.pack(lists)": (lambda: lib.pack([[1, 2, 3], [4, 5]]), tdc.DtypeError, "tdc.from_list(rows)"),
    "tdc.pack(arrays)": (lambda: lib.pack([np.ones(2), np.ones(3)]), tdc.DtypeError, "tdc.from_numpy(rows)"),
    "tdc.pack(a, b)": (lambda: lib.pack(torch.ones(2), torch.ones(3)), tdc.DtypeError, "tdc.pack([tensor, ...])"),
    "tdc.io.load(folder)": (lambda: tdc.io.load(Path(__file__).parent), tdc.FormatError, "tdc.io.save(td, path)"),
    "tdc.io.save(td, '/no/x')": (lambda: tdc.io.save(TD, "/no/x"), tdc.FormatError, "mkdir(parents=True)"),
    "td.memmap('/no/x')": (lambda: TD.memmap("/no/x"), tdc.FormatError, "mkdir(parents=True)"),
    "tdc.io.to_safetensors(td, '/no/x')": (
        lambda: tdc.io.to_safetensors(TD, "/no/x"), tdc.FormatError, "mkdir(parents=True)"
    ),
    "loader(shuffel=True)": (lambda: lib.data.loader(TD, 2, shuffel=True), tdc.DtypeError, "shuffle="),
    "loader(workers=2)": (lambda: lib.data.loader(TD, 2, num_workers=2), tdc.DtypeError, "one of max_tokens"),
    "td.to('xpu')": (lambda: TD.to("xpu"), tdc.UnsupportedError, "leave device out"),
    "x.to('mps')": (lambda: BATCHES["nested"].to("mps"), tdc.UnsupportedError, "leave device out"),
    "step(batch)": (lambda: step()(TD), tdc.DtypeError, "step(state, batch)"),
    "evaluate(batch)": (lambda: step().eval()(TD), tdc.DtypeError, "evaluate(state, batch)"),
    "step.load_state_dict(state, state)": (
        lambda: step().load_state_dict(step().init(), step().init()), tdc.DtypeError, "tdc.interop.to_state_dict("
    ),
    "step.load_state_dict(state, net.state_dict())": (
        lambda: step().load_state_dict(step().init(), nn.Linear(2, 1).state_dict()), tdc.StructureError,
        "net.load_state_dict(state_dict)",
    ),
    "encoder(x, mask=m)": (
        lambda: encoder(True)(BATCHES["nested"], mask=DENSE > 0), tdc.ShapeError, "is_causal=True or False"
    ),
    "torch.zeros(B, T)": (lambda: torch.zeros(*BATCHES["nested"].shape[:2]), tdc.ShapeError, "torch.zeros_like(x)"),
    "td.x": (lambda: TD.x, tdc.UnsupportedError, "td['x']"),
    "td.n": (lambda: TD.n, tdc.UnsupportedError, "td['n']"),
    "td.item()": (lambda: TD.item(), tdc.UnsupportedError, "td['a'].item()"),
    "td.to_padded()": (lambda: TD.to_padded(), tdc.UnsupportedError, "leaf.to_padded()"),
    "x.values = v": (lambda: put(BATCHES["nested"], "values", VALUES), tdc.ImmutableError, "x.with_values(values)"),
    "tdc.compile(fn)": (lambda: lib.compile(len), tdc.DtypeError, "torch.compile(fn, fullgraph=True)"),
    "tdc.optim(params)": (lambda: lib.optim([]), tdc.DtypeError, "tdc.optim.adam"),
    "nn.LSTM(4, 5)(x)": (lambda: nn.LSTM(4, 5)(BATCHES["nested"]), tdc.ShapeError, "batch_first=True"),
    "torch.zeros(x.shape)": (lambda: torch.zeros(BATCHES["nested"].shape), tdc.ShapeError, "torch.zeros_like(x)"),
    "torch.arange(x.shape[1])": (lambda: torch.arange(BATCHES["nested"].shape[1]), tdc.ShapeError, "tdc.positions(x)"),
    "tdc.Tensordict": (lambda: lib.Tensordict, tdc.UnsupportedError, "hint: tdc.TensorDict"),
    "tdc.nestedtensor": (lambda: lib.nestedtensor, tdc.UnsupportedError, "hint: tdc.NestedTensor"),
    "tdc.train_step": (lambda: lib.train_step, tdc.UnsupportedError, "hint: tdc.compile.train_step"),
    "tdc.optim.Adam": (lambda: lib.optim.Adam, tdc.UnsupportedError, "hint: tdc.optim.adam"),
    "tdc.io.savee": (lambda: lib.io.savee, tdc.UnsupportedError, "hint: tdc.io.save"),
    "from_padded(t, mask)": (lambda: tdc.from_padded(T, T[..., 0] > 0), tdc.DtypeError, "from_padded(data, mask=mask)"),
    "NestedTensor(values, lengths)": (
        lambda: tdc.NestedTensor(VALUES, LENGTHS), tdc.StructureError, "tdc.NestedTensor(values, tdc.offsets_of(lengths"
    ),
    "NestedTensor(values, [5])": (
        lambda: tdc.NestedTensor(VALUES, torch.tensor([5])), tdc.StructureError, "tdc.offsets_of(lengths)"
    ),
    "NestedTensor(values, [0, 3, 2])": (
        lambda: tdc.NestedTensor(VALUES, torch.tensor([0, 3, 2])), tdc.StructureError, "tdc.offsets_of(lengths)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("typed", RAGGED)
def test_of_a_ragged_batch(typed: str, kind: str):
    call, error, hint = RAGGED[typed]
    refused(lambda: call(BATCHES[kind]), error, hint)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("typed", INDICES)
def test_of_a_ragged_index_or_target(typed: str, kind: str):
    call, error, hint = INDICES[typed]
    refused(lambda: call(IDS[kind]), error, hint)


@pytest.mark.parametrize("typed", OTHERS)
def test_of_the_library(typed: str):
    refused(*OTHERS[typed])


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 40])  # torch makes a tuple of fewer than 32, and warns of it
@pytest.mark.parametrize("padded", [False, True])
def test_a_ragged_index_of_a_tensor(rows: int, padded: bool):
    packed: Any = tdc.pack([torch.tensor([0, 1])] * rows)
    ids, table = packed.to_padded() if padded else packed, TABLE
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a non-tuple sequence")
        for call in (lambda: table[ids], lambda: nn.Parameter(table)[ids]):
            with pytest.raises((tdc.UnsupportedError, UserWarning, IndexError)) as caught:
                call()
            assert isinstance(caught.value, tdc.TdcError) == (rows >= 32)
        with pytest.raises((tdc.UnsupportedError, UserWarning, IndexError)):
            table[ids] = 0.0


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("call", [lambda t, i: t[i], lambda t, i: t[i, 0], put_at])
def test_a_graph_refuses_a_ragged_index(call: Any, kind: str):
    with pytest.raises(Exception, match=r"F\.embedding\(ids, table\)|table\[ids|args/kwargs to proxy"):
        torch.compile(call, backend="eager", fullgraph=True)(TABLE.clone(), IDS[kind])


@pytest.mark.parametrize("kind", BATCHES)
def test_the_spellings_are_right(kind: str):
    x, ids = BATCHES[kind], IDS[kind]
    assert [row.shape for row in F.embedding(ids, TABLE).unbind()] == [(2, 4), (3, 4)]
    assert (x * LENGTHS.view(-1, 1, 1))[1].equal(x[1] * 3)
    packed = x if kind == "nested" else x.to_packed()
    assert torch.cat([packed] * 2, 1)[1].equal(ROWS[1].repeat(2, 1))
    assert nn.LSTM(4, 5, batch_first=True)(x)[0].shape[0] == 2
    table = TABLE.clone()
    flat = ids if kind == "nested" else ids.to_packed()
    table[flat.values] = 0.0
    assert not table[flat[0]].any()


def test_positional_lengths_of_a_rectangle():
    assert tdc.from_padded(T, LENGTHS).lengths.flatten().tolist() == [2, 3]


def test_offsets_with_empty_rows_are_no_lengths():
    assert tdc.NestedTensor(VALUES, torch.tensor([0, 0, 5])).lengths.tolist() == [0, 5]
    assert tdc.NestedTensor(VALUES[:0], torch.tensor([0])).shape[0] == 0


def test_an_attribute_that_is_no_key():
    with pytest.raises(AttributeError, match="'TensorDict' object has no attribute 'foo'"):
        _ = TD.foo
    assert not hasattr(TD, "x")

    def asks(td: Any) -> Any:
        return td["x"] + 1 if hasattr(td, "x") or hasattr(td, "foo") or hasattr(td, "item") else td["x"]

    assert torch.compile(asks, backend="eager", fullgraph=True)(TD).sum() == 0


def test_a_property_that_lacks_something_says_so():
    class Batch(tdc.TensorClass):
        x: torch.Tensor

        @property
        def twice(self) -> Any:
            return self.nothing  # pyright: ignore  # what it lacks

    with pytest.raises(AttributeError, match="nothing"):
        _ = Batch(torch.zeros(2), batch_size=[2]).twice


def test_a_module_stays_a_module():
    double = torch.compile(lambda x: lib.compile.checkpoint(torch.sin)(x) * 2, backend="eager", fullgraph=True)
    assert double(torch.zeros(2)).sum() == 0
    with pytest.raises(ImportError, match=r"hint: tdc\.TensorDict"):
        exec("from tdc import Tensordict")
    for module in (lib.compile, lib.io, lib.data):  # cloudpickle sends what functions of a worker use
        assert copy.deepcopy(module) is module
        assert pickle.loads(pickle.dumps(module)) is module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("x", [*BATCHES.values(), TD])
def test_a_device_that_is_not_there(x: Any):
    refused(lambda: x.to("cuda:0"), tdc.UnsupportedError, "x.to('cuda' if torch.cuda.is_available() else 'cpu')")
    refused(lambda: x.to(device=torch.device("cuda")), tdc.UnsupportedError, "x.to('cuda' if")


def test_what_is_no_parameter_and_no_update():
    x = tdc.pack([torch.ones(2, 4)])
    refused(lambda: nn.Parameter(x), tdc.DtypeError, "x.with_values(nn.Parameter")
    refused(lambda: nn.Parameter(x.to_padded()), tdc.DtypeError, "x.with_data(nn.Parameter")
    refused(lambda: tdc.optim.sgd(0.1).update(TD, TD), tdc.DtypeError, "expected a TensorDict, got NoneType")


def test_what_no_batch_is_equal_to():
    for x in (*BATCHES.values(), TD):
        assert (x == None) is False  # noqa: E711
        assert (x == "text") is False
        assert x != {}


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(lambda: tdc.data.to_arrow(TD), tdc.UnsupportedError, "pip install 'torch-tdc[arrow]'")
    refused(lambda: tdc.data.from_arrow([]), tdc.UnsupportedError, "pip install 'torch-tdc[arrow]'")
    refused(lambda: tdc.data.to_dataset(TD), tdc.UnsupportedError, "pip install 'datasets'")
