"""Gives the containers the methods that the rows of the table name; imported once all rows are there."""

from __future__ import annotations

from tdc.core.container import install_methods
from tdc.core.rules import RULES
from tdc.ops import alias
from tdc.ops.two_level import TWO_LEVEL_RULES
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict import methods as _tensordict_methods  # noqa: F401  # and TensorDict its own
from tdc.tensordict.tensordict import TensorDict

CLASSES: dict[str, type] = {
    "tensordict": TensorDict, "nested": NestedTensor, "masked": MaskedBatch, "two_level": TwoLevelTensor,
}  # fmt: skip
alias.install(CLASSES)
install_methods(CLASSES, (*RULES, *TWO_LEVEL_RULES))
