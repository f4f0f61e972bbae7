"""State dicts that fit in part: what was loaded, and what was not and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "interop.load_into"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` did with each name.

    Attributes:
        loaded: names that the parameters now have from the state dict.
        missing: names of parameters that the state dict lacks.
        unexpected: names of the state dict that are no parameters.
        mismatched: names of both, with other shapes: `{name: "what is there, what is wanted"}`.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]

    @property
    def complete(self) -> bool:
        """Whether all was loaded, and nothing is left over."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """One line for the count, and one for each name that was not loaded."""
        lines = [f"{len(self.loaded)} loaded"]
        lines += [f"missing: {name}" for name in self.missing]
        lines += [f"unexpected: {name}" for name in self.unexpected]
        return "\n".join(lines + [f"mismatched: {name}: {text}" for name, text in self.mismatched.items()])


def load_into(
    params: TensorDict, state_dict: Mapping[str, Any] | TensorDict, *, strict: bool = False, prefix: str = ""
) -> tuple[TensorDict, LoadReport]:
    """Parameters with the values of a state dict where names and shapes agree; the others stay as they are.

    Dtypes:
        values take the dtype and device of the parameter they replace. Those that have both already are not copied.

    Args:
        params: says which names, shapes, dtypes and devices are wanted, such as `tdc.from_module(net)`.
        state_dict: a flat dict with keys "a.b.c", as `net.state_dict()` gives, or a TensorDict.
        strict: refuse whatever is not complete.
        prefix: what the names of the state dict begin with and those of params do not, such as "module.".

    Returns:
        New parameters, and a report.

    Raises:
        DtypeError: no TensorDict, no state dict.
        StructureError: with strict, anything missing, unexpected or of another shape; all are named.

    Example:
        >>> import torch
        >>> params = TensorDict({"fc": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}})
        >>> saved = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(5), "old.weight": torch.ones(1)}
        >>> params, report = load_into(params, saved)
        >>> print(report)
        1 loaded
        unexpected: old.weight
        mismatched: fc.bias: Tensor float32[5], wanted Tensor float32[2]
        >>> params["fc"].to_dict()
        {'weight': tensor([[1., 1., 1.],
                [1., 1., 1.]]), 'bias': tensor([0., 0.])}

    Source:
        `torch.nn.Module.load_state_dict`, which refuses other shapes.
    """
    expect(OP, params, TensorDict, of=" of parameters")
    if not isinstance(state_dict, (Mapping, TensorDict)):
        hint = "load_into(params, net.state_dict())"
        raise DtypeError(message(OP, "a state dict", describe(state_dict), hint=hint))
    if not isinstance(prefix, str):
        raise DtypeError(message(OP, "a str as prefix", describe(prefix), hint="prefix='module.'"))
    table: Any = state_dict._leaves if isinstance(state_dict, TensorDict) else state_dict
    given = {show(p): x for p, x in table.items()}
    own = {f"{prefix}{show(p)}": p for p in params._leaves}
    report = compared(params, own, given)
    if strict:
        wrong = {**dict.fromkeys(report.missing, "missing"), **dict.fromkeys(report.unexpected, "unexpected")}
        hint = "strict=False loads the rest and reports these"
        expected = "the names and shapes of params"
        refuse_wrong(StructureError, OP, expected, {**wrong, **report.mismatched}, "that differ", hint)
    new = {own[name]: given[name].detach().to(params._leaves[own[name]]) for name in report.loaded}
    return build_td({**params._leaves, **new}, params._nodes, params._size, params._device), report


def compared(params: TensorDict, own: dict[str, KeyPath], given: dict[str, Any]) -> LoadReport:
    """Which names agree, and which do not; `own` are those of the parameters with the prefix."""
    both = {name: (given[name], params._leaves[path]) for name, path in own.items() if name in given}
    fits = [name for name, (x, like) in both.items() if isinstance(x, Tensor) and x.shape == like.shape]
    mismatched = {
        name: f"{describe(x)}, wanted {describe(y)}" for name, (x, y) in both.items() if name not in set(fits)
    }
    missing, unexpected = [name for name in own if name not in given], [name for name in given if name not in own]
    return LoadReport(tuple(fits), tuple(missing), tuple(unexpected), mismatched)
