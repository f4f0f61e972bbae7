"""Export: functions of containers as programs for all sizes, as files, and what they refuse."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import Model, batch, export_model, meta, rows, the_same
from torch import Tensor, nn

import tdc
from tdc import FormatError, MaskedBatch, NestedTensor, StructureError, TensorDict, UnsupportedError
from tdc.compile import Exported, Signature, export, load

AUTO, Dim = torch.export.Dim.AUTO, torch.export.Dim
SIZES = [(2, 6, 1, 4), (3,), (1,), (0,), (0, 0), (5, 0, 7)]  # sizes 0 and 1 are sizes as others


class Step(tdc.TensorClass):
    x: NestedTensor
    id: Tensor
    split: str = "train"


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


@pytest.fixture(scope="module")
def exported(model: Model) -> Exported:
    return export_model(model)


@pytest.mark.parametrize("lengths", SIZES)
def test_other_sizes_give_the_numbers_of_eager(exported: Exported, model: Model, lengths: tuple[int, ...]):
    td, bias = batch(*lengths), torch.randn(2)
    the_same(exported(td, bias=bias), model(td, bias=bias))
    the_same(exported(bias=bias, td=td), model(td, bias=bias))


def test_layouts_that_mean_the_same_are_taken(exported: Exported, model: Model):
    td, bias = batch(4, 2), torch.ones(2)
    x = td["x"]
    bare = td.set("x", NestedTensor(x.values, x.offsets))  # without the longest length
    the_same(exported(bare, bias=bias)["mean"], model(td, bias=bias)["mean"])
    the_same(exported(td.with_device("cpu"), bias=bias)["mean"], model(td, bias=bias)["mean"])


def test_everything_varies_by_default():
    run = export(lambda x, y, m: (x.sum(1) + y, m.sum(1)), (rows(3, 2), torch.randn(2, 3), rows(4, 2).to_padded()))
    for lengths in SIZES:
        x, y, m = rows(*lengths), torch.randn(len(lengths), 3), rows(*lengths, 1).to_padded()
        the_same(run(x, y, m), (x.sum(1) + y, m.sum(1)))
    assert [str(e) for e in run.signature().inputs[:4]] == [
        "float32[N, 3]", "int64[B + 1]", "uint8[L, 0]", "float32[B, 3]",
    ]  # fmt: skip
    assert run.signature().inputs[4].sizes[0].name == "B2"  # nothing says that the two batches are of one size


def test_tensorclass_in_and_out():
    def fn(step: Step) -> Step:
        return step.replace(x=step.x * 2, id=step.id + 1)

    def make(*lengths: int) -> Step:
        return Step(rows(*lengths), torch.arange(len(lengths)), batch_size=[len(lengths)])

    run, step = export(fn, make(2, 3), dynamic={"step": {"batch": "B"}}), make(1, 0, 4)
    assert type(run(step)) is Step
    the_same(run(step), fn(step))
    with pytest.raises(StructureError, match=r"at step.split: Static\('test'\) instead of Static\('train'\)"):
        run(step.replace(split="test"))
    with pytest.raises(StructureError, match=r"at step: TensorDict .* instead of Step"):
        run(step.to_tensordict())


def test_functional_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    params = tdc.from_module(net)

    def fn(params: TensorDict, td: TensorDict) -> Any:
        return tdc.functional_call(net, params, (td["x"],)).mean(1)

    run, td = export(fn, (params, batch(2, 3))), batch(1, 4, 2)
    the_same(run(params * 2, td), fn(params * 2, td))
    with pytest.raises(StructureError, match=r"at params.2.bias: Tensor float32\[5\] instead of Tensor float32\[2\]"):
        run(params.set(("2", "bias"), torch.zeros(5)), td)


def test_stock_transformer():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    encoder.requires_grad_(False).eval()
    x, y = (tdc.pack([torch.randn(n, 4) for n in lengths]) for lengths in ((3, 5), (1, 4, 2)))
    the_same(export(encoder, x, dynamic={"src": {"batch": "B", "length": (0, 512)}})(y), encoder(y))


def test_a_padded_batch_and_bounds_of_its_length():
    run = export(lambda x: x * 2, rows(3, 2).to_padded(), dynamic={"x": {"batch": "B", "length": (0, 4)}})
    x = rows(4, 1, 2).to_padded()
    the_same(run(x), x * 2)
    with pytest.raises(StructureError, match=r"at x: length 5, not 0 to 4 \(L\)"):
        run(rows(5, 1).to_padded())


def test_a_length_that_is_not_carried_is_read():
    def bare(*lengths: int) -> NestedTensor:
        return NestedTensor(rows(*lengths).values, rows(*lengths).offsets)

    run = export(lambda x: x.sum(1), bare(3, 2), dynamic={"x": {"length": ("L", 2, 4)}})
    assert run(bare(4, 0)).shape == (2, 3)
    assert run(rows(4, 0)).shape == (2, 3)
    for lengths in ((5, 1), (1, 1)):
        with pytest.raises(StructureError, match=rf"at x: length {max(lengths)}, not 2 to 4 \(L\)"):
            run(bare(*lengths))


def test_one_name_is_one_size():
    run = export(lambda x, y: (x.sum(), y.sum()), (torch.ones(3, 2), torch.ones(3)), dynamic={"x": "B", "y": "B"})
    assert run(torch.ones(4, 2), torch.ones(4))[0] == 8
    with pytest.raises(StructureError, match=r"at y: batch 5, but x has batch 4 \(B\)"):
        run(torch.ones(4, 2), torch.ones(5))


def test_dims_of_tensors_by_number_and_relations_between_them():
    x, y = torch.randn(4, 6), torch.randn(3, 6)
    run = export(lambda x, y: x[1:] + y, (x, y), dynamic={"x": {0: "T", 1: Dim("D", min=2, max=9)}, "y": {1: AUTO}})
    assert [str(e) for e in run.signature().inputs] == ["float32[T, D]", "float32[T - 1, D]"]
    assert str(run.signature().outputs[0]) == "float32[T - 1, D]"
    the_same(run(torch.ones(6, 3), torch.ones(5, 3)), torch.full((5, 3), 2.0))
    with pytest.raises(StructureError, match=r"at y: batch 7, but x has batch 6 \(T\)"):
        run(torch.ones(6, 3), torch.ones(6, 3))


def test_what_is_fixed_is_fixed():
    run = export(lambda x, flag: x * 2 if flag else x, (torch.ones(3, 2), True), dynamic={"x": False})
    assert run(torch.ones(3, 2), True).sum() == 12
    with pytest.raises(StructureError, match=r"at x: Tensor float32\[4, 2\] instead of Tensor float32\[3, 2\]"):
        run(torch.ones(4, 2), True)
    with pytest.raises(StructureError, match="at flag: bool instead of the constant True"):
        run(torch.ones(3, 2), False)


def test_lists_and_dicts_of_arguments():
    def fn(xs: list[Any], *more: Any, **named: Any) -> Any:
        return xs[0].sum(1) + more[0] + named["last"]["y"]

    x, y = rows(2, 3), torch.ones(2, 3)
    run = export(fn, ([x], y), {"last": {"y": y}}, dynamic={"xs": [{"batch": "B"}], "last": {"y": "B"}})
    x, y = rows(2, 3, 1), torch.ones(3, 3)
    the_same(run([x], y, last={"y": y}), fn([x], y, last={"y": y}))
    with pytest.raises(StructureError, match=r"at last.y: missing\nat last.z: unknown key"):
        run([x], y, last={"z": y})
    with pytest.raises(StructureError, match="at xs: tuple instead of list of 1"):
        run((x,), y, last={"y": y})


def test_arguments_that_share_a_tensor_in_the_example_may_differ_later():
    x = rows(2, 3)
    run = export(lambda a, b: a.with_values(a.values * 2).sum(1) + b.sum(1).sum(0), (x, x.relu()))
    a, b = rows(2, 3, 1), rows(4)
    the_same(run(a, b), a.sum(1) * 2 + b.sum(1).sum(0))
    run = export(lambda a, b: a + b, (x, x.relu()))
    with pytest.raises(RuntimeError, match=r"tdc\.add: expected operands of one ragged structure"):
        run(rows(2, 3), rows(3, 2))


@pytest.mark.parametrize("fn", [lambda x: x[1:], lambda x: x[:2], lambda x: x[2:1], lambda x: x[0]])
def test_slices_of_rows(fn: Any):
    run, x = export(fn, rows(2, 3, 4), dynamic={"x": {"batch": "B"}}), rows(1, 5, 0, 3)
    tdc.testing.assert_close(run(x), fn(x))  # a graph carries no bound of chosen rows


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 gives both ends of such a slice no size")
def test_slices_of_rows_from_the_end():
    run, x = export(lambda x: x[-2:-1], rows(2, 3, 4), dynamic={"x": {"batch": "B"}}), rows(1, 5, 0, 3)
    tdc.testing.assert_close(run(x), x[-2:-1])


# -- files


def test_save_and_load(exported: Exported, model: Model, tmp_path: Path):
    path = exported.save(tmp_path / "model.pt2")
    loaded, td, bias = load(path), batch(2, 6, 1), torch.ones(2)
    the_same(loaded(td, bias=bias), model(td, bias=bias))
    assert loaded.signature() == exported.signature()
    assert repr(loaded) == repr(exported)
    with pytest.raises(StructureError, match=r"at td\.x: length 8, not 0 to 7"):
        loaded(batch(8), bias=bias)
    assert torch.export.load(path).module()(td, bias=bias)["mean"].shape == (3, 2)  # still a file of torch's own
    assert {"format": 1, "kind": "export", "tdc": tdc.__version__, "torch": torch.__version__}.items() <= meta(
        path
    ).items()


def test_weights_in_a_file_of_their_own(exported: Exported, tmp_path: Path):
    path = exported.save(tmp_path / "model.pt2", weights="separate")
    td, bias, other = batch(2, 6, 1), torch.ones(2), Model().requires_grad_(False)
    the_same(load(path)(td, bias=bias), exported(td, bias=bias))
    params = tdc.from_module(other)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    tied = load(path)
    for loaded in (load(path, weights=params), load(path, weights=tmp_path / "other.pt"), tied.load_weights(params)):
        the_same(loaded(td, bias=bias), other(td, bias=bias))


def test_weights_from_safetensors(exported: Exported, tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    other = Model().requires_grad_(False)
    safetensors.save_file(other.state_dict(), tmp_path / "other.safetensors")
    path = exported.save(tmp_path / "model.pt2", weights="separate")
    td, bias = batch(2, 1), torch.ones(2)
    the_same(load(path, weights=tmp_path / "other.safetensors")(td, bias=bias), other(td, bias=bias))


def test_constants_of_a_function_stay_when_its_weights_change(tmp_path: Path):
    class Shifted(Model):
        def forward(self, x: NestedTensor) -> Tensor:  # type: ignore[override]  # of fewer arguments
            return self.linear(x).sum(1) + torch.tensor([1.0, 2.0])

    one, other = Shifted().requires_grad_(False), Shifted().requires_grad_(False)
    path, x = export(one, rows(2, 3)).save(tmp_path / "model.pt2", weights="separate"), rows(1, 4, 2)
    the_same(load(path)(x), one(x))
    the_same(load(path, weights=tdc.from_module(other))(x), other(x))


def test_a_graph_of_another_torch_is_loaded_with_a_warning(exported: Exported, tmp_path: Path):
    path = exported.save(tmp_path / "model.pt2")
    meta(path, torch="2.1.0")
    with pytest.warns(
        UserWarning, match=r"tdc\.compile\.load: expected a program exported by torch .*, got one by torch 2\.1"
    ):
        load(path)


def test_a_damaged_file(exported: Exported, tmp_path: Path):
    path = exported.save(tmp_path / "model.pt2")
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begin = next(i for i in archive.infolist() if i.filename.endswith("models/model.json")).header_offset
    for damaged in (good[:-100], good[: begin + 500] + b"?" + good[begin + 501 :], b"", b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"tdc\.compile\.load: expected a .*, got model\.pt2, which "):
            load(path)


def test_signature_goes_through_json(exported: Exported):
    data = json.loads(json.dumps(exported.signature().to_data()))
    assert Signature.from_data(data) == exported.signature()


def test_a_compiled_package_has_no_program(exported: Exported):
    with pytest.raises(UnsupportedError, match="expected a program, got a compiled package"):
        _ = Exported(exported.signature(), package=object()).program


def test_masked_and_nested_are_told_apart():
    run = export(lambda x: x * 1, rows(2, 3))
    with pytest.raises(
        StructureError, match=r"MaskedBatch float32\[2, 3, 3\] instead of NestedTensor float32\[B, -1, 3\]"
    ):
        run(rows(2, 3).to_padded())
    assert isinstance(export(lambda x: x * 1, rows(2, 3).to_padded())(rows(1, 4).to_padded()), MaskedBatch)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_training_mode_warns(layer: nn.Module):
    x = tdc.pack([torch.ones(n, 4) for n in (2, 3)])
    net = nn.Sequential(nn.Linear(4, 4), layer)
    given = x if isinstance(layer, nn.Dropout) else torch.ones(3, 4)
    with pytest.warns(UserWarning, match="expected a module in evaluation mode, got .* as in training"):
        export(net.train(), given)
    export(net.eval(), given)


def test_dropout_of_nothing_does_not_warn():
    export(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(), torch.ones(3, 4))


def decided(x: Any) -> Any:
    if x.sum() > 0:
        return x * 2
    return x


@pytest.mark.parametrize("fn", [decided, lambda x: x[: int(x.values.sum())]])
def test_what_data_decides_is_named(fn: Any, capsys: pytest.CaptureFixture[str]):
    expected = r"no data decides, got .*\nat test_export.py:\d+ in .*\nhint: tdc.cond for an if"
    with pytest.raises(UnsupportedError, match=expected):
        export(fn, tdc.pack([torch.ones(2), torch.ones(3)]))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("path", "how", "text"),
    [
        ("m.pt", {}, r"expected a path that ends in .pt2, got 'm.pt'\nhint: exported.save\('m.pt2'\)"),
        ("m.pt2", {"format": "onnx"}, "expected format='export' or format='aoti', got 'onnx'"),
        ("m.pt2", {"weights": "no"}, "expected weights='inside' or weights='separate', got 'no'"),
    ],
)
def test_saving_names_what_is_wrong(exported: Exported, path: str, how: dict[str, str], text: str):
    with pytest.raises(FormatError, match=text):
        exported.save(path, **how)
