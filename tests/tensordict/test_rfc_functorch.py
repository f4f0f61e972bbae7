"""The RFC "torch.dict.TensorDict" on functorch and pytrees, block by block; the rest of it is in test_rfc.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from functorch.dim import dims
from torch import nn
from torch.utils import _pytree as pytree

import tdc
from tdc import TensorDict

# -- Functorch compatibility


def test_vmap():
    td = TensorDict({"a": torch.zeros(3, 4, 5)}, batch_size=[3, 4])
    ones = torch.ones(4, 5)
    td_out = tdc.vmap(lambda td, one: td.set("a", td.get("a") + one), in_dims=(0, None), out_dims=(1,))(td, ones)
    assert td_out.shape == torch.Size([4, 3])
    assert td_out["a"].eq(1).all()


def test_functional_call_of_an_ensemble():
    module1, module2 = nn.Linear(3, 2), nn.Linear(3, 2)
    params = torch.stack([tdc.from_module(module1), tdc.from_module(module2)], 0)
    assert params.batch_size == (2,)
    x = torch.randn(5, 3)
    for vmap in (torch.vmap, tdc.vmap):
        y = vmap(lambda p, x: tdc.functional_call(module1, p, x), (0, None))(params, x)
        assert torch.allclose(y, torch.stack([module1(x), module2(x)]))
    assert torch.equal(params.unbind(0)[1]["weight"], module2.weight)


def test_first_class_dims():
    """The RFC hands the result to `functional_call`; that of torch (2.13) takes no tensor with such a dim."""
    module1, module2 = nn.Linear(3, 2), nn.Linear(3, 2)
    params = torch.stack([tdc.from_module(module1), tdc.from_module(module2)], 0)
    dim = dims(1)
    hidden = params[dim]
    assert len(hidden.batch_size) == 0
    x = torch.randn(5, 3)
    y = F.linear(x, hidden["weight"], hidden["bias"]).order(dim)
    assert torch.allclose(y, torch.stack([module1(x), module2(x)]), atol=1e-6)


# -- PyTree compatibility


def test_pytree():
    td = TensorDict(
        {
            "a": TensorDict(
                {
                    "b": TensorDict({"c": torch.ones(2, 3, 4)}, [2, 3]),
                    "d": torch.ones(2),
                },
                [2],
            ),
            "e": 1,
        },
        [],
    )
    td = pytree.tree_map(lambda x: x + 1, td)
    assert (td == 2).all()
    assert torch.equal(td, torch.full_like(td, 2))
    assert td.shape == torch.Size([])
    assert td["a"].shape == torch.Size([2])
    assert td["a", "b"].shape == torch.Size([2, 3])
    assert td["a", "b", "c"].shape == torch.Size([2, 3, 4])
