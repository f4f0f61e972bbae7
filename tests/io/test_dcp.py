"""Checkpoints of torch.distributed: what comes back, in as many processes as there are, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stores import Point, every_kind, same
from texts import Texts

import tdc
from tdc import FormatError, TensorDict
from tdc.io import dcp_load, dcp_save

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
torch_dcp: Any = pytest.importorskip("torch.distributed.checkpoint")


def test_everything_comes_back(tmp_path: Path):
    td = every_kind()
    dcp_save(td, tmp_path / "c")
    back = dcp_load(tmp_path / "c", trusted=True, classes=[Point])
    assert same(td, back)
    assert type(back["point"]) is Point
    assert back["weight"] is back["tied"]
    assert back["text"].structure is back["labels"].structure


def test_some_keys(tmp_path: Path):
    td = every_kind()
    dcp_save(td, tmp_path / "c")
    assert torch.equal(dcp_load(tmp_path / "c", ("info", "q"), trusted=True), td["info", "q"])
    some = dcp_load(tmp_path / "c", ["tied", ("info", "deep")], trusted=True)
    assert same(some, td.select("tied", ("info", "deep")))
    with pytest.raises(tdc.KeyPathError, match=r"tdc.io.dcp_load: .*'wieght'"):
        dcp_load(tmp_path / "c", "wieght", trusted=True)


def test_other_programs_find_the_tensors(tmp_path: Path):
    net = torch.nn.Linear(2, 3)
    dcp_save(tdc.interop.from_state_dict(net.state_dict()), tmp_path / "c")
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.load(state, checkpoint_id=str(tmp_path / "c"))
    assert torch.equal(state["weight"], net.weight)


def test_like_says_the_device_and_is_left_alone(tmp_path: Path):
    td = TensorDict({"x": torch.arange(3), "n": tdc.pack([torch.ones(1), torch.ones(2)] * 1 + [torch.ones(0)])}, [3])
    dcp_save(td, tmp_path / "c")
    like = TensorDict({"x": torch.zeros(3, dtype=torch.int64)}, [3])
    back = dcp_load(tmp_path / "c", like=like, trusted=True)
    assert same(back, td)
    assert like["x"].tolist() == [0, 0, 0]


def test_overwriting(tmp_path: Path):
    td = TensorDict({"x": torch.arange(3)}, [3])
    dcp_save(td, tmp_path / "c")
    with pytest.raises(FormatError, match=r"tdc.io.dcp_save: expected a path where nothing is, got a checkpoint"):
        dcp_save(td, tmp_path / "c")
    dcp_save(td + 1, tmp_path / "c", overwrite=True)
    assert dcp_load(tmp_path / "c", "x", trusted=True).tolist() == [1, 2, 3]
    tdc.io.save(td, tmp_path / "store")
    with pytest.raises(FormatError, match="expected a path where nothing is"):
        dcp_save(td, tmp_path / "store")


class Exploit:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_is_unpickled_unless_the_source_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    Path("c/.metadata").write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(FormatError, match="which may run code"):
        dcp_load("c")
    assert not Path("ran").exists()


def test_damaged_checkpoints(tmp_path: Path):
    dcp_save(every_kind(), tmp_path / "c")
    index = (tmp_path / "c" / ".metadata").read_bytes()
    for data in (b"", b"no pickle", index[: len(index) // 2], pickle.dumps(3)):
        (tmp_path / "c" / ".metadata").write_bytes(data)
        with pytest.raises(FormatError, match=r"tdc.io.dcp_load: expected a checkpoint.*\nhint: "):
            dcp_load(tmp_path / "c", trusted=True)
    (tmp_path / "c" / ".metadata").write_bytes(index)
    (tmp_path / "c" / "__0_0.distcp").unlink()
    with pytest.raises(FormatError, match="expected a whole checkpoint, got files that torch cannot read"):
        dcp_load(tmp_path / "c", trusted=True)


def test_another_tensor_than_the_manifest_says(tmp_path: Path):
    dcp_save(TensorDict({"x": torch.arange(3)}, [3]), tmp_path / "a")
    manifest = torch.frombuffer(
        bytearray(tdc.io.to_buffer(TensorDict({"x": torch.zeros(3, 2), "y": torch.ones(3)}, [3]))[1]), dtype=torch.uint8
    )
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.save({"x": torch.arange(3), "__metadata__": manifest}, checkpoint_id=str(tmp_path / "b"))
    with pytest.raises(FormatError, match=r"got 2 others\nat x: not as in the index\nat y: not as in the index"):
        dcp_load(tmp_path / "b", trusted=True)
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.save({"x": torch.arange(3)}, checkpoint_id=str(tmp_path / "d"))
    with pytest.raises(FormatError, match=r"expected a checkpoint of tdc.io.dcp_save, got one without a manifest"):
        dcp_load(tmp_path / "d", trusted=True)


def test_like_on_meta_is_refused(tmp_path: Path):
    dcp_save(TensorDict({"x": torch.ones(2)}), tmp_path / "a")
    with pytest.raises(tdc.UnsupportedError, match=r"at x: .* on meta"):
        dcp_load(tmp_path / "a", like=TensorDict({"x": torch.ones(2, device="meta")}), trusted=True)


class TestTexts(Texts):
    def test_refusals(self):
        self.says(lambda: dcp_load("no/such"), """\
FormatError
tdc.io.dcp_load: expected trusted=True, got an index that is a pickle, which may run code
hint: trusted=True for a checkpoint of your own; tdc.io.load and from_safetensors for files of strangers"""
        )  # fmt: skip
        self.says(lambda: dcp_load("no/such", trusted=True), """\
FormatError
tdc.io.dcp_load: expected a checkpoint, got nothing at 'no/such'
hint: tdc.io.dcp_save writes one; tdc.io.load reads a store""")  # fmt: skip
        td = TensorDict({"m": torch.zeros(2, device="meta"), "s": torch.eye(2).to_sparse()})
        self.says(lambda: dcp_save(td, "no/such"), """\
UnsupportedError
tdc.io.dcp_save: expected tensors with content, got 1 others
at m: Tensor float32[2], which has no content
hint: td.exclude(key)""")  # fmt: skip
        self.says(lambda: dcp_save(td.exclude("m"), "no/such"), """\
UnsupportedError
tdc.io.dcp_save: expected tensors in memory, ragged batches, and Python values that JSON holds, got 1 others
at s: Tensor float32[2, 2], which is no dense tensor of a dtype that files have
hint: td.exclude(key); tdc.from_torch(x) of torch.nested, x.to_dense() of sparse ones, tdc.io.dcp_save for DTensors"""
        )  # fmt: skip
        self.says(lambda: dcp_save(TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}), "no/such"), """\
FormatError
tdc.io.dcp_save: expected key paths whose keys join to different names, all Unicode, got 1 that do not
at a.b: a.b
hint: td.rename_keys({...}) of one of them, or tdc.io.save""")  # fmt: skip


# -- several processes


def run(world: int, word: str, folder: Path) -> None:
    """Run a word of `dcp_processes` in so many processes."""
    script = Path(__file__).with_name("dcp_processes.py")
    meeting = folder / f"meeting-{word}-{world}"
    run_processes(script, lambda rank: [word, str(rank), str(world), str(meeting), str(folder / "c")], world)


@pytest.mark.slow
def test_saved_by_two_loaded_by_others(tmp_path: Path):
    run(2, "save", tmp_path)
    for world in (1, 2, 3):
        run(world, "load", tmp_path)


@pytest.mark.sweep
@pytest.mark.slow
def test_processes_with_different_forms_all_raise(tmp_path: Path):
    run(2, "differ", tmp_path)
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.sweep
@pytest.mark.slow
def test_leaves_that_differ_are_named_by_all(tmp_path: Path):
    """Found by trying: a mixture was saved, some leaves of one process and some of another."""
    run(2, "values_differ", tmp_path)


@pytest.mark.sweep  # of seconds: a busy machine may take longer
def test_a_process_killed_while_it_saves_is_an_error_and_the_last_checkpoint_loads(tmp_path: Path):
    run(2, "killed", tmp_path)
    assert dcp_load(tmp_path / "before", trusted=True)["weight"].shape == (7, 5)


@pytest.mark.sweep
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("word", ["train", "train_in_buckets", "train_in_parts"])
def test_training_goes_on_with_any_number_of_processes(word: str, tmp_path: Path):
    for world in (2, 1, 4, 3):
        run(world, word, tmp_path)
