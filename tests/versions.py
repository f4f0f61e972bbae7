"""What an older torch lacks, said by tests that run on it, too.

    with refused("derivative for aten::aminmax is not implemented"):
        ...     a newer torch runs this; torch 2.11 raises an error with this text, and no number is compared

Invariant: a newer torch does all that stands in such a block, and a torch that begins to do it fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])
OLD = torch.__version__ < "2.12"  # torch 2.11, the oldest that tdc supports


@contextmanager
def refused(text: str, when: bool = True) -> Iterator[None]:
    """A block that torch 2.11 ends with an error whose text has a match of `text`."""
    if OLD and when:
        with pytest.raises(Exception, match=text):
            yield
    else:
        yield


def clean_up() -> None:
    """Undo what a trace that fails leaves behind in torch 2.11: hooks of saved tensors off, hooks of export on."""
    torch._C._autograd._saved_tensors_hooks_enable()
    torch.nn.modules.module._global_buffer_registration_hooks.clear()


of_the_pinned_torch = pytest.mark.skipif(VERSION > (2, 13), reason="a list with torch.cholesky and torch.qr")


def before(major: int, minor: int) -> bool:
    """True if this torch is older than a release."""
    return (major, minor) > VERSION
