"""`inplace=True` of stock modules changes no batch, eagerly and in a graph, where Dynamo passes it by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tdc

MODULES = [
    nn.ReLU(True), nn.ReLU6(True), nn.LeakyReLU(0.3, True), nn.ELU(0.5, True), nn.SELU(True), nn.CELU(0.5, True),
    nn.Hardtanh(-0.5, 0.5, True), nn.Threshold(0.1, 3.0, True), nn.Dropout(0.5, True), nn.AlphaDropout(0.5, True),
    nn.SiLU(True), nn.Mish(True), nn.Hardswish(True), nn.Hardsigmoid(True), nn.RReLU(0.1, 0.3, True),
]  # fmt: skip


def content(x: Any) -> torch.Tensor:
    return x.values if isinstance(x, tdc.NestedTensor) else x.data if isinstance(x, tdc.MaskedBatch) else x["a"]


def batch(kind: str) -> Any:
    values = torch.tensor([-3.0, -0.4, 0.3, 2.0, -1.0])
    x = tdc.pack([values[:2].clone(), values[2:].clone()])
    return {"nested": x, "masked": x.to_padded(), "tensordict": tdc.TensorDict({"a": values.clone()}, [5])}[kind]


@pytest.mark.cases(slow=0)
@pytest.mark.parametrize("kind", ["nested", "masked", "tensordict"])
@pytest.mark.parametrize("backend", ["", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_stay(kind: str, backend: str):
    """One input for each module, all modules in one graph."""
    given = [batch(kind) for _ in MODULES]
    before = content(given[0]).clone()

    def run(*xs: Any) -> list[Any]:
        return [module(x) for module, x in zip(MODULES, xs, strict=True)]

    found = (torch.compile(run, backend=backend, fullgraph=True) if backend else run)(*given)
    for module, x, out in zip(MODULES, given, found, strict=True):
        assert torch.equal(content(x), before), module
        if not isinstance(module, (nn.Dropout, nn.AlphaDropout, nn.RReLU)):
            torch.testing.assert_close(content(out), module(before.clone()), msg=str(module))


def test_functions_that_share_a_name_with_a_module():
    """`torch.dropout` drops elements, `torch.feature_dropout` channels; order and names are torch's."""
    x: Any = tdc.pack([torch.ones(4, 50), torch.ones(4, 60)], ragged_dim=2)
    for y in (x, x.to_padded()):
        kept = torch.dropout(y, 0.5, True).unbind()[0]
        assert set(kept.unique().tolist()) == {0.0, 2.0}
        assert not all(len(row.unique()) == 1 for row in kept)
        assert all(len(row.unique()) == 1 for row in torch.feature_dropout(y, 0.5, True).unbind()[0])
        weight, bias, mean, var = torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4) + 1
        args = weight, bias, mean, var, False, 0.1, 1e-5, True
        wanted = F.batch_norm(y, mean, var, weight, bias)
        torch.testing.assert_close(torch.batch_norm(y, *args).unbind(), wanted.unbind())
        torch.testing.assert_close(torch.instance_norm(y, *args).unbind(), wanted.unbind())
    ids: Any = tdc.pack([torch.tensor([1, 2])])
    with pytest.raises(tdc.UnsupportedError, match=r"F\.embedding_bag"):
        torch.embedding_bag(torch.rand(3, 2), ids, torch.tensor([0]))
