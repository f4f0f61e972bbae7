"""`tdc.nn.register_full_backward_hook`: gradients of containers, as torch's hook has those of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tdc
from tdc import DtypeError, StructureError, TensorDict


def watched(module: nn.Module, change: Any = None) -> list[Any]:
    """What the hook of a module was called with."""
    seen: list[Any] = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append((grad_input, grad_output))
        return change(grad_input) if change else None

    seen.append(tdc.nn.register_full_backward_hook(module, hook))
    return seen


def ragged(padded: bool = False) -> Any:
    x = tdc.pack([torch.rand(n, 3) for n in (2, 0, 3)])
    x = x.to_padded(0.0) if padded else x
    return x.with_data(x.data.requires_grad_()) if padded else x.with_values(x.values.requires_grad_())


@pytest.mark.parametrize("padded", [False, True])
def test_the_gradients_of_a_batch_are_those_of_its_rows(padded: bool):
    layer, x = nn.Linear(3, 4), ragged(padded)
    found = watched(layer)
    layer(x).square().sum().backward()
    ((of_x,), (of_y,)) = found[1]
    assert type(of_x) is type(of_y) is type(x)
    for row, a, b in zip(x.unbind(), of_x.unbind(), of_y.unbind(), strict=True):
        leaf = row.detach().requires_grad_()
        y = layer(leaf)
        torch.testing.assert_close(b, 2 * y.detach())
        torch.testing.assert_close(a, torch.autograd.grad(y.square().sum(), leaf)[0])
    torch.testing.assert_close(of_x.values if not padded else of_x.data, x.grad.values if not padded else x.grad.data)


def test_tensors_as_torch_has_them():
    ours, x = nn.Linear(3, 4), torch.rand(2, 3, requires_grad=True)
    seen, theirs = watched(ours), []
    ours.register_full_backward_hook(lambda module, a, b: theirs.append((a, b)))
    ours(x).exp().sum().backward()
    torch.testing.assert_close(seen[1], theirs[0])


class Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, td: TensorDict, scale: float, other: torch.Tensor) -> Any:
        return td.set("y", self.linear(td["x"]) * scale), other * 2


def test_tensordicts_tuples_and_numbers():
    module, x, other = Fields(), torch.rand(2, 3, requires_grad=True), torch.rand(2, requires_grad=True)
    seen = watched(module)
    td, more = module(TensorDict({"x": x, "i": torch.arange(2)}, [2]), 3.0, other)
    (td["y"].sum() + more.sum()).backward()
    (of_td, of_scale, of_other), (of_out, of_more) = seen[1]
    assert of_td.keys() == ("x",)
    assert of_out.keys() == ("y",)
    assert of_scale is None
    torch.testing.assert_close(of_td["x"], x.grad)
    torch.testing.assert_close((of_other, of_more), (torch.full((2,), 2.0), torch.ones(2)))


def test_a_hook_may_change_the_gradients_and_goes_away():
    layer, x = nn.Linear(3, 4), ragged()
    seen = watched(layer, lambda grads: tuple([2 * g for g in grads]))
    layer(x).sum().backward()
    changed = x.grad.values.clone()
    seen[0].remove()
    (plain,) = torch.autograd.grad(layer(x).sum(), x.values)
    torch.testing.assert_close(changed, 2 * plain)
    assert len(seen) == 2
    watched(layer, lambda grads: (*grads, None))
    with pytest.raises(StructureError, match="2 for 1 arguments"):
        layer(x).sum().backward()


def test_without_gradients_of_arguments():
    layer, x = nn.Linear(3, 4), ragged().detach()
    seen = watched(layer)
    layer(x).sum().backward()
    assert seen[1][0] == (None,)
    assert seen[1][1][0].lengths.tolist() == [2, 0, 3]
    with torch.no_grad():
        layer(x)
    assert len(seen) == 2


def test_wrong_kinds_are_refused():
    register: Any = tdc.nn.register_full_backward_hook
    with pytest.raises(DtypeError, match=r"tdc.nn.register_full_backward_hook"):
        register(3, print)
    with pytest.raises(DtypeError, match=r"tdc.nn.register_full_backward_hook"):
        register(nn.Linear(2, 2), 3)
