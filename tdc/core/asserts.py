"""Assertions on data: immediate on CPU, asynchronous on CUDA, nodes of the graph when traced."""

from __future__ import annotations

from torch import Tensor

from tdc.core.dynamo import without_vmap
from tdc.core.errors import StructureError
from tdc.core.torch_functions import assert_async


def require(condition: Tensor, text: str, error: type[Exception] = StructureError) -> None:
    """Assert a condition on data: `error` at once on CPU, asynchronously on CUDA, a node of the graph when traced.

    The node's text is one line without double quotes: Inductor puts it as it is into C++ (torch 2.11-2.13).
    """
    try:
        one_line = text.replace("\n", "; ").replace('"', "'")
        assert_async(without_vmap(condition), one_line)
    except RuntimeError:
        raise error(text) from None
