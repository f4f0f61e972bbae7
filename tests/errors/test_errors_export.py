"""The text of what export, its files and what was exported refuse. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from exports import Model, batch, export_model, meta, rows
from texts import Says, Texts, says
from torch import nn

import tdc
from tdc import FormatError, TensorDict
from tdc.compile import Exported, export, load


@pytest.fixture(scope="module")
def exported() -> Exported:
    return export_model(Model().requires_grad_(False))


SAYS: dict[str, Says] = {
    "an example out of bounds": (
        lambda: export(lambda x: x, rows(2, 3), dynamic={"x": {"batch": (4, 8), "length": ("L", 0, 2)}}), """\
ShapeError
tdc.compile.export: expected an example within the bounds, got 2 sizes beyond
at x.batch: 2, not in 4 to 8
at x.length: 3, not in 0 to 2
hint: widen the bounds, or take another example"""),
    "names that the function needs equal": (
        lambda: export(torch.add, (torch.ones(3), torch.ones(3)), dynamic={"arg0": "B", "arg1": "C"}), """\
ShapeError
tdc.compile.export: expected sizes that vary as declared, got 1 that do not
at arg1.batch: the function needs C = B
hint: declare what the function does, or 'auto' to let it decide"""),
    "arguments that do not fit the function": (lambda: export(lambda x: x, (1, 2)), """\
DtypeError
tdc.compile.export: expected example arguments for (x), got too many positional arguments
hint: export(fn, (first, second), {'name': value})"""),
}  # fmt: skip
test_says = says(SAYS)


class TestRefusals(Texts):
    """What is wrong is said before anything runs."""

    @pytest.fixture(autouse=True)
    def _given(self, exported: Exported, tmp_path: Path) -> None:
        self.call, self.path, self.bias = exported, tmp_path / "model.pt2", torch.ones(2)

    def test_signature(self):
        self.assertExpectedInline(repr(self.call), """\
Exported Model(td, bias)
  inputs
    0  td.meta.id    int64[B]
    1  td.x.values   float32[N, 3]
    2  td.x.offsets  int64[B + 1]
    3  td.x.extent   uint8[L, 0]
    4  bias          float32[2]
  outputs
    0  float32[B, 2]
    1  float32[N, 2]
    2  int64[B + 1]
    3  uint8[L, 0]
    4  float32[B, L, 2]
    5  int64[B, 1]
    6  None
    7  float32[N, 2]
    8  int64[B + 1]
    9  uint8[L, 0]
    10 int64[B]
    11 float32[N, 3]
    12 int64[B + 1]
    13 uint8[L, 0]
    14 3
  dims
    B  0 to 8     batch of td
    N  0 or more  total of td.x
    L  0 to 7     length of td.x""")  # fmt: skip

    def test_wrong_dtype_and_feature_size(self):
        x = tdc.pack([torch.ones(2, 4), torch.ones(1, 4)])
        td = TensorDict({"x": x, "meta": {"id": torch.zeros(2)}}, [2])
        self.says(lambda: self.call(td, bias=self.bias.double()), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 3 that differ
at td.meta.id: Tensor float32[2] instead of Tensor int64[B]
at td.x: NestedTensor float32[2, -1, 4] instead of NestedTensor float32[B, -1, 3]
at bias: Tensor float64[2] instead of Tensor float32[2]
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_missing_and_unknown_keys(self):
        self.says(lambda: self.call(batch(2, 3).rename_keys({"x": "y"}), bias=self.bias), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 2 that differ
at td.x: missing
at td.y: unknown key
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_beyond_the_bounds(self):
        self.says(lambda: self.call(batch(*range(9)), bias=self.bias), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 3 that differ
at td.meta.id: batch 9, not 0 to 8 (B)
at td.x: batch 9, not 0 to 8 (B)
at td.x: length 8, not 0 to 7 (L)
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_another_container(self):
        td = batch(2, 3)
        self.says(lambda: self.call(td.set("x", td["x"].to_padded()), bias=self.bias), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 1 that differs
at td.x: MaskedBatch float32[2, 3, 3] instead of NestedTensor float32[B, -1, 3]
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_another_argument(self):
        self.says(lambda: self.call(torch.ones(2), self.bias, 3, mask=None), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 2 that differ
at mask: no argument
at argument 2: no argument
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_a_dict_for_a_tensordict(self):
        self.says(lambda: self.call(batch(2).to_dict(), bias=self.bias), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 1 that differs
at td: dict instead of TensorDict
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_no_batch_dims(self):
        self.says(lambda: self.call(TensorDict(batch(2), []), bias=self.bias), """\
StructureError
tdc.compile.Exported: expected arguments as Model was exported with, got 1 that differs
at td: batch_size [] instead of 1 batch dims
hint: print(exported.signature()) shows what it takes""")  # fmt: skip

    def test_unknown_names_in_dynamic(self):
        dynamic = {"td": {"x": {"lenght": "L"}, "meta": {"di": "B"}, "y": "B"}, "bais": False}
        self.says(lambda: export(Model(), (batch(2, 3),), {"bias": self.bias}, dynamic=dynamic), """\
KeyPathError
tdc.compile.export: expected names of arguments, keys and dims in dynamic=, got 4 others
at bais: arguments are 'td', 'bias'
at td.meta.di: keys are 'id'
at td.y: keys are 'meta', 'x'
at td.x.lenght: words are 'batch', 'length', 'total'
hint: what is not said varies if it can""")  # fmt: skip

    def test_no_dims_in_dynamic(self):
        dynamic = {"a": {0: 3, 1: (5, 2)}, "b": {"length": ["L", "M"], "batch": ("B", "x", 2)}}
        self.says(lambda: export(lambda a, b: a, (torch.ones(3, 4), rows(2, 3)), dynamic=dynamic), """\
DtypeError
tdc.compile.export: expected dims, got 4 others
at a.batch: 3
at a.dim 1: (5, 2)
at b.batch: ('B', 'x', 2)
at b.length: 2 dims for 1 ragged ones
hint: one of 'B', (1, 64), ('B', 1, 64), torch.export.Dim('B'), True, 'auto' or False""")  # fmt: skip

    def test_a_size_that_the_function_fixes(self):
        fn = lambda x, y: (x.expand(3, 2), y * 2)  # noqa: E731
        self.says(lambda: export(fn, (torch.ones(3, 2), torch.ones(4)), dynamic={"x": "B", "y": ("K", 0, 9)}), """\
ShapeError
tdc.compile.export: expected sizes that vary as declared, got 1 that do not
at x.batch: the function fixes it to 3
hint: declare what the function does, or 'auto' to let it decide""")  # fmt: skip

    def test_arguments_that_no_file_holds(self):
        names = TensorDict({"name": tdc.ObjectArray(["a", "b"])}, [2])
        self.says(lambda: export(lambda td, fn: td, (names, torch.relu)), """\
UnsupportedError
tdc.compile.export: expected tensors, containers of them, numbers or strings, got 2 others
at td.name: ObjectArray [2]
at fn: builtin_function_or_method
hint: exclude the key, or pass its tensors""")  # fmt: skip

    def test_save_elsewhere(self):
        self.says(lambda: self.call.save(self.path.with_suffix(".onnx"), format="onnx"), """\
FormatError
tdc.compile.Exported.save: expected format='export' or format='aoti', got 'onnx'
hint: format='export', the default""")  # fmt: skip

    def test_load_nothing(self):
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected a file, got nothing at model.pt2
hint: exported.save(path) writes one""")  # fmt: skip

    def test_load_what_another_wrote(self):
        torch.export.save(self.call.program, str(self.path))
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected a file that tdc wrote, got model.pt2, which has no extra/tdc.json
hint: torch.export.load or torch._inductor.aoti_load_package reads it""")  # fmt: skip

    def test_load_what_was_changed(self):
        self.call.save(self.path)
        meta(self.path, sha256="0" * 64)
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected the contents that were saved, got model.pt2, whose contents changed since
hint: copy or save it again""")  # fmt: skip

    def test_load_a_newer_format(self):
        self.call.save(self.path)
        meta(self.path, format=2, tdc="9.0")
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected format 1 or older, got format 2, written by tdc 9.0
hint: install that version of tdc""")  # fmt: skip

    def test_load_a_package_of_another_torch(self):
        self.call.save(self.path)
        meta(self.path, kind="aoti", torch="9.9.1+cpu")
        with pytest.raises(FormatError, match=r"expected a package compiled for torch 2\.\d+, got one for torch 9\.9"):
            load(self.path)

    def test_load_a_class_that_is_not_defined(self):
        self.call.save(self.path)
        data = meta(self.path)["signature"]
        data["specs"][0] = data["specs"][0].replace("tdc.NestedTensor", "shop.Order")
        meta(self.path, signature=data)
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected classes that this process knows, got shop.Order
hint: import the module that defines the classes of its arguments and results first""")  # fmt: skip

    def test_other_weights(self):
        self.call.save(self.path, weights="separate")
        weights = {"linear.weight": torch.ones(2, 4), "linear.bias": torch.ones(2), "head": torch.ones(1)}
        self.says(lambda: load(self.path, weights=weights), """\
StructureError
tdc.compile.Exported.load_weights: expected weights as the function was exported with, got 3 that differ
at scale: missing
at head: unknown
at linear.weight: Tensor float32[2, 4] instead of float32[2, 3]
hint: tdc.from_module(net) of the net that was exported; step.load_into(net, state) fills it from a state"""
        )  # fmt: skip

    def test_weights_that_are_gone_or_changed(self):
        self.call.save(self.path, weights="separate")
        beside = self.path.with_name("model.weights.pt")
        torch.save({}, beside)
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected the weights saved with the package, got model.weights.pt, which changed
hint: load(path, weights=...)""")  # fmt: skip
        beside.unlink()
        self.says(lambda: load(self.path), """\
FormatError
tdc.compile.load: expected the weights saved with the package, got model.weights.pt, which is missing
hint: load(path, weights=...)""")  # fmt: skip

    def test_weights_for_a_file_that_has_its_own(self):
        self.call.save(self.path)
        self.says(lambda: load(self.path, weights={}), """\
UnsupportedError
tdc.compile.Exported.load_weights: expected a file without weights, got one with its own
hint: exported.save(path, weights='separate')""")  # fmt: skip


def test_a_wrong_size_is_said_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(logging.Handler, "handle", lambda self, record: said.append(record.getMessage()))
    x = tdc.pack([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(tdc.ShapeError, match="expected 5 features, got 4"):
        export(nn.Linear(5, 1), (x,))
    assert said == []
