"""Memory that processes share: one storage for a TensorDict, sent to another process as one descriptor."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tdc
from tdc import NestedTensor, ObjectArray, Static, TensorDict
from tdc.core.dynamo import storage_id
from tdc.tensordict.sending import reduce

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")


@tdc.tensorclass
class Point:
    """A tensorclass that goes to another process."""

    xy: torch.Tensor
    name: str = "here"


def mixed() -> TensorDict:
    """Leaves of most kinds, two tied, two of one structure."""
    text, weight = tdc.pack([torch.ones(2, 5), torch.ones(0, 5), torch.ones(3, 5)]), torch.arange(12.0).view(3, 4)
    return TensorDict(
        {
            "weight": weight, "tied": weight, "text": text, "labels": text.sum(2), "padded": text.to_padded(),
            "images": tdc.pack([torch.rand(2, 3), torch.rand(0, 1), torch.rand(4, 2)], ragged_dim=(1, 2)),
            "point": Point(torch.zeros(3, 2), batch_size=[3]), "who": ObjectArray(["a", {"b": 1}, None]),
            "split": Static("train"), "turned": torch.rand(2, 3).t(), "none": torch.zeros(3, 0),
            "grad": torch.ones(3, requires_grad=True),
        },
        [3],
    )  # fmt: skip


def tensors(td: TensorDict) -> dict[str, torch.Tensor]:
    """All tensors with elements, those of ragged leaves by their parts."""
    found: dict[str, torch.Tensor] = {}
    for key in td.keys(True, True):
        x, name = td[key], str(key)
        if isinstance(x, NestedTensor):
            found |= {name: x.values, f"{name} offsets": x.offsets}
            found |= {} if x.structure.shapes is None else {f"{name} shapes": x.structure.shapes}
        elif isinstance(x, tdc.MaskedBatch):
            found |= {name: x.data, f"{name} lengths": x.lengths}
        elif isinstance(x, torch.Tensor):
            found[name] = x
    return {name: x for name, x in found.items() if x.numel()}


def check_equal(a: TensorDict, b: TensorDict) -> None:
    """Equal in keys, content, ties and structures."""
    assert a.keys(True) == b.keys(True)
    here, there = tensors(a), tensors(b)
    for name, x in here.items():
        assert torch.equal(x, there[name]), name
        assert x.requires_grad == there[name].requires_grad, name
    assert b["weight"] is b["tied"]
    assert b["text"].structure is b["labels"].structure
    assert type(b["point"]) is Point
    assert b["who"].tolist() == ["a", {"b": 1}, None]
    assert b["split"] == "train"
    assert b["none"].shape == (3, 0)


def storages(td: TensorDict) -> set[int]:
    return {storage_id(x) for x in tensors(td).values()}


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- one storage


def test_shared_leaves_lie_in_one_storage():
    td = mixed()
    shared = td.share_memory()
    check_equal(td, shared)
    assert len(storages(shared)) == 1
    assert all([x.is_shared() and x.data_ptr() % 64 == 0 for x in tensors(shared).values()])
    assert not td["weight"].is_shared()
    assert shared["turned"].is_contiguous()


def test_what_is_shared_already_stays():
    td = mixed().share_memory()
    again = td.set("new", torch.zeros(3)).share_memory()
    assert {id(x) for x in tensors(td).values()} <= {id(x) for x in tensors(again).values()}
    assert len(storages(again)) == 2
    assert TensorDict({}, [3]).share_memory().batch_size == (3,)


def test_parameters_graphs_and_others():
    net = nn.Linear(2, 2)
    td = TensorDict({"w": net.weight, "h": net.weight * 2}).share_memory()
    assert td["w"].requires_grad
    assert td["w"].is_leaf
    assert td["h"].is_leaf
    td["w"].sum().backward()
    assert net.weight.grad is None


def test_what_has_no_memory_is_named():
    td = TensorDict({"s": torch.eye(2).to_sparse(), "x": torch.ones(2), "n": {"m": torch.zeros(2, device="meta")}})
    with pytest.raises(tdc.UnsupportedError) as caught:
        td.share_memory()
    assert str(caught.value) == (
        "tdc.share_memory: expected dense tensors with content, got 2 others\n"
        "at s: Tensor float32[2, 2] on cpu, torch.sparse_coo\n"
        "at n.m: Tensor float32[2] on meta, torch.strided\n"
        "hint: td.exclude(key), or x.to_dense()"
    )


def test_leaves_do_not_touch_each_other():
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]).share_memory()
    before = td["b"]._version
    td["a"].add_(1)
    assert td["b"]._version == before
    assert td["b"].sum() == 0


def test_empty_leaves_that_are_alike():
    """Found by a test of buffers: of several without elements that lie beside each other, one came back."""
    td = TensorDict({"a": torch.ones(0), "b": torch.ones(0), "c": torch.ones(0, 3), "d": torch.ones(0, 3)})
    for found in (td.share_memory(), td.set("e", torch.ones(3, 0)).set("f", torch.ones(3, 0)).share_memory()):
        assert all([found[key].shape == x.shape for key, x in td.items()])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_nothing_to_lock_memory_for():
    with pytest.raises(
        tdc.UnsupportedError, match=r"tdc.pin_memory: expected an accelerator to lock memory for.*\nhint"
    ):
        mixed().pin_memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_locked_leaves_lie_in_one_storage():
    td = mixed().detach()
    pinned = td.pin_memory()
    assert len(storages(pinned)) == 1
    assert all([x.is_pinned() for x in tensors(pinned).values()])
    assert {id(x) for x in tensors(pinned.pin_memory()).values()} == {id(x) for x in tensors(pinned).values()}
    assert pinned.to("cuda", non_blocking=True)["weight"].is_cuda


# -- sent to another process


def echo(inbox: Any, outbox: Any) -> None:
    """Sends back what it gets; adds 1 to the weights of what comes with the word "add"."""
    for word, td in iter(inbox.get, None):
        if word == "add":
            tdc.copy_(td.select("weight"), td.select("weight") + 1)
        outbox.put(len(storages(td)) if word == "count" else td)
        del td


@pytest.fixture(scope="module")
def trip() -> Iterator[Any]:
    """A round trip to a spawned process."""
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(inbox, outbox), daemon=True)
    process.start()

    def go(td: TensorDict, word: str = "") -> Any:
        inbox.put((word, td))
        return outbox.get(timeout=60)

    yield go
    inbox.put(None)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.sweep
@pytest.mark.slow
def test_there_and_back(trip: Any):
    td = mixed()
    check_equal(td, trip(td))
    assert not td["weight"].is_shared()
    assert trip(td, "count") == 1
    shared = td.share_memory()
    back = trip(shared)
    check_equal(td, back)
    back["weight"].fill_(7)
    assert shared["weight"].eq(7).all()
    assert not td["weight"].eq(7).all()


@pytest.mark.slow
def test_what_the_child_writes_is_seen(trip: Any):
    td = mixed().share_memory()
    trip(td, "add")
    assert torch.equal(td["weight"], torch.arange(12.0).view(3, 4) + 1)
    part = td.exclude("grad").set("more", torch.zeros(3))[1:]
    trip(part, "add")
    assert torch.equal(td["weight"][1:], torch.arange(12.0).view(3, 4)[1:] + 2)
    assert trip(part, "count") == 2


def add(*given: TensorDict) -> None:
    """The work of a process that is given TensorDicts as arguments."""
    for td in given:
        check_equal(td, td)
        tdc.copy_(td.select("weight"), td.select("weight") + 1)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_argument_of_a_process(method: str):
    td, other = mixed(), mixed()
    shared = other.share_memory()
    before = shared["weight"].clone()
    process = mp.get_context(method).Process(target=add, args=(td, shared))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(shared["weight"], before + 1)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@on_linux
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_descriptors_return_to_where_they_were(trip: Any, count: int):
    shared, new = mixed().share_memory(), mixed()
    trip(shared)
    before = descriptors()
    for _ in range(count):
        trip(shared)
        trip(new)
    assert descriptors() <= before + 1


@pytest.mark.slow
@on_linux
def test_one_descriptor_is_sent():
    td = TensorDict({f"k{i}": torch.ones(3) for i in range(50)}, [3]).share_memory()
    before = descriptors()
    data = ForkingPickler.dumps(td)
    assert descriptors() <= before + 3  # a copy for the receiver, and the socket that hands it over
    back = pickle.loads(data)
    assert back["k7"].untyped_storage().data_ptr() == back["k8"].untyped_storage().data_ptr()
    for mixture in (mixed(), mixed().share_memory()):  # objects, offsets and lengths among it
        assert len(reduce(mixture)[1][1]) == 1


def test_leaves_of_one_form_are_one_entry():
    """Such as lie one behind another; what arrives is no view of another leaf."""
    td = TensorDict({f"k{i}": torch.full((4, 16), float(i)) for i in range(50)}, [4])
    for sent in (td, td.share_memory()):
        assert [entry[-1] for entry in reduce(sent)[1][2]] == [50]
        back = pickle.loads(ForkingPickler.dumps(sent))
        assert (back == td).all()
        back["k7"].add_(1)
        assert [back[f"k{i}"]._version for i in (6, 7, 8)] == [0, 1, 0]
        assert back["k8"].sum() == 8 * 64
        assert not back["k7"]._is_view()


@pytest.mark.parametrize("shared", [False, True])
def test_leaves_of_many_forms(shared: bool):
    """Empty ones, such with room behind them, other dtypes, expanded ones, parameters between tensors."""
    x: dict[str, torch.Tensor] = {f"empty{i}": torch.ones(4, 0) for i in range(2)}
    x |= {f"rows{i}": torch.rand(4, 16) for i in range(3)} | {f"odd{i}": torch.rand(4, 3) for i in range(3)}
    x |= {f"param{i}": torch.rand(4, 16).requires_grad_() for i in range(2)} | {"half": torch.rand(4, 32).half()}
    x |= {f"wide{i}": torch.rand(1).expand(4) for i in range(2)} | {f"flag{i}": torch.rand(4) > 0.5 for i in range(2)}
    x |= {f"t{i}": torch.rand(16, 4).t() for i in range(2)} | {"nothing": torch.ones(4, 0, 2)}
    td = TensorDict(x, [4])
    back = pickle.loads(ForkingPickler.dumps(td.detach().share_memory() if shared else td))
    for key, value in td.items():
        assert torch.equal(back[key], value)
        assert back[key].shape == value.shape
        assert back[key].dtype == value.dtype
        assert back[key].requires_grad is (value.requires_grad and not shared)


def test_expanded_conjugate_and_subclassed_leaves(trip: Any):
    wide, z = torch.ones(1).expand(3, 10**6), torch.randn(3, dtype=torch.complex64)
    td = TensorDict({"weight": torch.ones(3), "wide": wide, "z": z.conj(), "p": nn.Parameter(torch.ones(3))}, [3])
    back = trip(td)
    assert back["wide"].untyped_storage().nbytes() == 4
    assert torch.equal(back["z"], z.conj())
    assert isinstance(back["p"], nn.Parameter)


def test_a_graph_is_refused_as_torch_refuses_it():
    td = TensorDict({"x": torch.ones(3, requires_grad=True) * 2})
    with pytest.raises(RuntimeError, match="non-leaf tensor"):
        ForkingPickler.dumps(td)


def test_objects_that_hold_tensors_and_tensordicts(trip: Any):
    inner = TensorDict({"x": torch.ones(2)}, [2])
    td = TensorDict({"weight": torch.zeros(2), "o": ObjectArray([inner, [torch.ones(3)]])}, [2])
    back = trip(td)
    first, second = back["o"].tolist()
    assert torch.equal(first["x"], inner["x"])
    assert torch.equal(second[0], torch.ones(3))
    assert trip(td, "count") == 1


def test_maps_of_files_are_copied(trip: Any, tmp_path: Path):
    td = mixed().detach()
    tdc.io.to_safetensors(td, tmp_path / "x.safetensors")
    back = trip(tdc.io.from_safetensors(tmp_path / "x.safetensors", classes=[Point]))
    assert torch.equal(back["text"].values, td["text"].values)


def test_leaves_of_a_store_go_by_its_path(trip: Any, tmp_path: Path):
    td = TensorDict({"weight": torch.rand(3, 10000), "text": tdc.pack([torch.ones(9000)] * 3)}, [3])
    tdc.io.save(td, tmp_path / "store")
    loaded = tdc.io.load(tmp_path / "store")
    rest, storages, metas = reduce(loaded)[1]
    assert len(rest) < 1000
    assert storages == metas == []
    back = trip(loaded.set("new", torch.ones(3)))
    assert torch.equal(back["weight"], td["weight"])
    assert back["new"].is_shared()


class Rows(Dataset[TensorDict]):
    """Examples of a TensorDict."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> TensorDict:
        return TensorDict({"x": torch.full((3,), i), "y": torch.tensor(i)})


@pytest.mark.slow
def test_workers_of_a_loader():
    loader = DataLoader(Rows(), 2, collate_fn=tdc.data.collate, num_workers=1, multiprocessing_context="spawn")
    batches = list(loader)
    assert [b["y"].tolist() for b in batches] == [[0, 1], [2, 3]]
    assert all([len(storages(b)) == 1 for b in batches])


def test_plain_pickles_are_what_they_were():
    td = mixed()
    check_equal(td, pickle.loads(pickle.dumps(td)))
    assert pickle.dumps(td["point"]) == pickle.dumps(td["point"])
