"""What every test starts from: one seed, one thread, and a compiler that has seen nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # before a test imports torch.testing, which locks it: the digits of a CPU


@pytest.fixture(autouse=True)
def _start_over() -> Iterator[None]:
    """The same random numbers in every test, and no graph left of the one before."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
