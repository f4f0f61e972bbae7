"""What torch's own samples cost under pytest."""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core


def forget_callers() -> None:
    """Let torch draw samples without looking for its own test among the callers.

    It reads the source of every frame at each sample; under pytest that was nine tenths of the time.
    """
    for module in (common_utils, core):
        module.extract_test_fn = lambda: None  # pyright: ignore[reportAttributeAccessIssue]  # a name of torch's
