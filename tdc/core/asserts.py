"""Assertions on data: immediate on CPU, asynchronous on CUDA, nodes of the graph when traced.

In a graph an assertion is an operator of our own: an error in a loop of several threads, of which Inductor makes
torch's own a part, ends the process (torch 2.11-2.15). An exported graph needs no Python, and has torch's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx.node import has_side_effect

from tdc.core.dynamo import exporting, traced_for, without_vmap
from tdc.core.errors import StructureError
from tdc.core.operators import operator
from tdc.core.private import nothing
from tdc.core.torch_functions import assert_async


def require(condition: Tensor, text: str, error: type[Exception] = StructureError) -> None:
    """Assert a condition on data: `error` at once on CPU, asynchronously on CUDA, a node of the graph when traced.

    The node's text is one line without double quotes: an exported graph puts it as it is into C++ (torch 2.11-2.13).
    """
    try:
        one_line = text.replace("\n", "; ").replace('"', "'")
        assert_data(without_vmap(condition), one_line)
    except RuntimeError:
        raise error(text) from None


def assert_data(condition: Tensor, text: str) -> None:
    """Raise a RuntimeError of this text for a false condition."""
    assert_async(condition, text)


@traced_for(assert_data)
def assert_traced(condition: Tensor, text: str) -> None:
    if exporting():
        assert_async(condition, text)
    else:
        require_op(condition, text)


def over_vmap(op: Any, info: Any, in_dims: Any, condition: Tensor, text: str) -> tuple[None, None]:
    """Under vmap all examples share one condition."""
    op(condition.all(), text)
    return None, None


require_op: Any = operator(
    "require(Tensor condition, str text) -> ()", nothing, over_vmap, CompositeExplicitAutograd=assert_async
)
has_side_effect(require_op)  # no pass removes it
