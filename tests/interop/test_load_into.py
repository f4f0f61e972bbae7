"""State dicts that fit in part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tdc
from tdc import from_module
from tdc.interop import load_into


def nets() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 5, bias=False)
    )


def test_what_fits_is_loaded_and_the_rest_reported():
    new, old = nets()
    params = from_module(new)
    found, report = load_into(params, old.state_dict())
    assert report.loaded == (
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    )  # fmt: skip
    assert (report.missing, report.unexpected) == ((), ("3.weight",))
    assert list(report.mismatched) == ["2.weight", "2.bias"]
    assert not report.complete
    assert (
        str(report)
        == """\
7 loaded
unexpected: 3.weight
mismatched: 2.weight: Tensor float32[5, 4], wanted Tensor float32[2, 4]
mismatched: 2.bias: Tensor float32[5], wanted Tensor float32[2]"""
    )
    assert found.keys(True, True) == params.keys(True, True)
    assert_close(found["0", "weight"], old[0].weight.detach())
    assert found["2", "weight"] is params["2", "weight"]
    assert not found["0", "weight"].requires_grad


def test_all_of_it():
    new, _ = nets()
    params = from_module(new)
    wrapped = {f"module.{k}": v for k, v in nets()[0].state_dict().items()}
    found, report = load_into(params, wrapped, strict=True, prefix="module.")
    assert report.complete
    assert str(report) == "9 loaded"
    again, _ = load_into(params, found, strict=True)
    assert_close(again.to_dict(), found.to_dict(), rtol=0, atol=0)
    half, _ = load_into(params.bfloat16(), found.double())
    assert half["0", "weight"].dtype == torch.bfloat16
    _, report = load_into(params, {"0.weight": "text"})
    assert report.mismatched == {"0.weight": "str, wanted Tensor float32[4, 3]"}
    assert len(report.missing) == 8


def test_strict_names_everything():
    new, old = nets()
    saved = old.state_dict()
    del saved["0.bias"]
    with pytest.raises(
        tdc.StructureError, match=r"(?s)got 4 that differ.*at 0.bias: missing.*at 3.weight: unexpected.*at 2"
    ):
        load_into(from_module(new), saved, strict=True)
    with pytest.raises(tdc.DtypeError, match="expected a state dict, got list"):
        load_into(from_module(new), [1])
