"""Guards of a compiled call: arguments, settings and code of the user are checked, the code of this library is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tdc
from bench._timing import count_guards
from tdc.compile import counted
from tdc.compile._torch.dynamo import is_own_code, that_may_change

SETTINGS = {"scale": 2.0}


def relu_of(td: Any) -> Any:
    return torch.relu(td["x"]).sum(1) * SETTINGS["scale"]


def of_dict(d: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + 1 for name, x in d.items()}


def of_tensordict(td: tdc.TensorDict) -> tdc.TensorDict:
    return td + 1


def guards_of(fn: Any, x: Any) -> int:
    """Guards of a function that is compiled by `counted`."""
    run = counted(fn, backend="eager")
    run(x)
    compiled: Any = run._compiled
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(compiled._torchdynamo_orig_callable)
    return sum(count_guards(entry.guard_manager.root) for entry in entries)


def test_a_tensordict_has_few_more_guards_than_a_dict():
    plain = {f"key{i}": torch.ones(4) for i in range(50)}
    assert guards_of(of_tensordict, tdc.TensorDict(plain, [4])) <= 1.2 * guards_of(of_dict, plain)


def test_what_may_change_is_checked():
    """A global of the user's module, a size, a dtype."""
    td = tdc.TensorDict({"x": tdc.pack([torch.ones(2), torch.ones(3)])}, [2])
    run = counted(relu_of, backend="eager")
    assert run(td).tolist() == [4.0, 6.0]
    SETTINGS["scale"] = 3.0
    try:
        assert run(td).tolist() == [6.0, 9.0]
    finally:
        SETTINGS["scale"] = 2.0
    assert run(td.to(torch.float64)).dtype == torch.float64
    assert run.counts.compiles == 3


def test_own_code():
    assert all(is_own_code(x) for x in (tdc.pack, tdc.TensorDict, tdc.compile))
    assert not any(is_own_code(x) for x in (torch.relu, torch, 3, relu_of, None, that_may_change.__code__))
