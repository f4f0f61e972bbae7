"""Guards of a compiled call: arguments, settings and code of the user are checked, the code of this library is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tdc
from bench import _timing
from tdc.compile import counted, train_step
from tdc.compile._torch.dynamo import is_own_code, that_may_change
from tdc.optim import adamw

SETTINGS = {"scale": 2.0}


def relu_of(td: Any) -> Any:
    return torch.relu(td["x"]).sum(1) * SETTINGS["scale"]


def of_dict(d: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + 1 for name, x in d.items()}


def of_tensordict(td: tdc.TensorDict) -> tdc.TensorDict:
    return td + 1


def guards_of(fn: Any, x: Any) -> int:
    """Guards of a function that is compiled by `counted`."""
    run: Any = counted(fn, backend="eager")
    run(x)
    return _timing.guards_of(run._compiled._torchdynamo_orig_callable)


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


def test_a_function_that_is_handed_over_is_checked():
    run = counted(lambda td, fn: td["x"] * fn(td), backend="eager")
    td = tdc.TensorDict({"x": torch.tensor([1.0, 2.0])}, [2])
    assert [run(td, fn).tolist() for fn in (tdc.nbytes, tdc.param_count)] == [[8.0, 16.0], [2.0, 4.0]]


def test_a_class_that_is_defined_again_is_checked():
    """In a notebook, say, with another method and another default."""
    run = counted(lambda td, row: row.of(td["x"]), backend="eager")
    td = tdc.TensorDict({"x": torch.tensor([1.0, 2.0])}, [2])

    def row(factor: float) -> Any:
        class Row:
            def of(self, x: Tensor, by: float = factor) -> Tensor:
                return x * by

        return Row()

    assert [run(td, row(factor)).tolist() for factor in (2.0, 3.0)] == [[2.0, 4.0], [3.0, 6.0]]


def test_a_step_of_many_parameters_has_few_more_guards_than_its_tensors():
    """Three leaves a parameter, with three guards each and its key, and 200 for settings and code of torch."""
    params = {f"w{i}": torch.ones(2) for i in range(50)}
    step = train_step(lambda p, x: sum([(p[f"w{i}"] * x).sum() for i in range(50)]), adamw(0.1), backend="eager")
    step(step.init(tdc.TensorDict(params)), torch.ones(2))
    run: Any = step._run
    assert _timing.guards_of(run._compiled._torchdynamo_orig_callable) <= 3 * 150 + 150 + 200
