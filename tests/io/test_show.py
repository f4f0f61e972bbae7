"""`python -m tdc show`: the tree of a store as people read it, and what is wrong with one."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from expecttest import TestCase
from stores import every_kind, put, rewrite

import tdc
from tdc.__main__ import main
from tdc.io import save


def printed(*words: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(words)
    return status, out.getvalue()


class TestShow(TestCase):
    @pytest.fixture(autouse=True)
    def _given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        self.store = tmp_path / "store"

    def test_every_kind(self):
        save(every_kind(), "store")
        status, text = printed("show", "store")
        assert status == 0
        self.assertExpectedInline(text, """\
tdc.store version 1, 12 files, 756 B, no checksums
tie    tied: weight
tie    labels (offsets): text (offsets)
class  point: stores.Point

key        kind                                     shape        dtype    device  bytes
---------------------------------------------------------------------------------------
(all)      TensorDict                               [3]                           756 B
  weight   Tensor                                   [3, 4]       float32  cpu      48 B
  tied     Tensor                                   [3, 4]       float32  cpu      48 B
  text     NestedTensor                             [3, -1, 5]   float32  cpu     132 B
  labels   NestedTensor                             [3, -1]      float32  cpu      52 B
  images   NestedTensor                             [3, -1, -1]  float32  cpu     136 B
  padded   MaskedBatch                              [3, 3, 5]    float32  cpu     204 B
  caption  ObjectArray                              [3]
  point    TensorDict                               [3]                            24 B
    xy     Tensor                                   [3, 2]       float32  cpu      24 B
    name   Static('here')
  info     TensorDict                               [3, 4]                        192 B
    q      Tensor                                   [3, 4, 2]    float32  cpu      96 B
    deep   TensorDict                               [3, 4]                         96 B
      id   Tensor                                   [3, 4]       int64    cpu      96 B
  split    Static(('train', 1, None, (2.5, True)))
  empty    TensorDict                               [3]                             0 B
---------------------------------------------------------------------------------------
10 leaves, 143 elements, 756 B
""")  # fmt: skip

    def test_checksums(self):
        save(tdc.TensorDict({"x": torch.ones(3)}, [3]), "store", checksums=True)
        assert printed("show", "store")[1].startswith("tdc.store version 1, 1 file, 12 B, with checksums\n")
        self.assertExpectedInline(printed("show", "store", "--verify")[1], """\
tdc.store version 1, 1 file, 12 B, checksums right

key    kind        shape  dtype    device  bytes
------------------------------------------------
(all)  TensorDict  [3]                      12 B
  x    Tensor      [3]    float32  cpu      12 B
------------------------------------------------
1 leaf, 3 elements, 12 B
""")  # fmt: skip
        (self.store / "x.memmap").write_bytes(b"\0" * 12)
        status, text = printed("show", "store", "--verify")
        assert status == 1
        self.assertExpectedInline(text, """\
tdc.io.load: expected every file as the manifest says, got 1 that are not
at x: its checksum is wrong, so its bytes changed since they were written
hint: save it again with tdc.io.save
""")  # fmt: skip

    def test_damage(self):
        save(every_kind(), "store")
        rewrite(self.store, put("weight", dtype="float33"))
        status, text = printed("show", "store")
        assert status == 1
        self.assertExpectedInline(text, """\
tdc.io.load: expected entries of format 1, got one that is not
at weight: the dtype 'float33', which is unknown
hint: save it again with tdc.io.save
""")  # fmt: skip

    def test_what_is_no_store(self):
        assert printed("show", "nothing") == (
            1, "tdc.io.load: expected a store, got nothing at 'nothing'\nhint: tdc.io.save writes one\n"
        )  # fmt: skip

    def test_one_file(self):
        tdc.io.to_safetensors(tdc.TensorDict({"fc": {"bias": torch.ones(3)}}), "net.safetensors")
        status, text = printed("show", "net.safetensors")
        assert status == 0
        self.assertExpectedInline(text, """\
safetensors

key       kind        shape  dtype    device  bytes
---------------------------------------------------
(all)     TensorDict  []                       12 B
  fc      TensorDict  []                       12 B
    bias  Tensor      [3]    float32  cpu      12 B
---------------------------------------------------
1 leaf, 3 elements, 12 B
""")  # fmt: skip
        status, text = printed("show", "net.safetensors", "--verify")
        assert status == 1
        assert "expected a store with checksums, got a file, which has none" in text

    def test_names_that_would_spoil_a_terminal(self):
        save(tdc.TensorDict({"tie": (x := torch.ones(1)), "\x1b[31m\n": x}), "store")
        text = printed("show", "store")[1]
        assert r"tie    '\x1b[31m\n': tie" in text
        assert r"  '\x1b[31m\n'  Tensor " in text
        assert "\x1b" not in text
