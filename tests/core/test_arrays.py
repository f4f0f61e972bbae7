"""The memory of tensors as arrays of numpy, and the tensors that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tdc.core import arrays
from tdc.core.arrays import array_of, ndarray

untyped: Any = torch  # whose stubs do not name all it has
X = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
READABLE: dict[str, Tensor] = {
    "whole": X,
    "from the second on": X[1:],
    "in steps": X[:, ::2],
    "in another order": X.transpose(0, 1),
    "one number": X[1, 2, 3:],
    "of one size": X[:, :1, :1],
    "expanded": X[:1].expand(5, 3, 4),
    "nothing": torch.empty(0, 3),
    "a parameter": nn.Parameter(X),
    "half precision": X.bfloat16(),
    "bytes between": torch.frombuffer(bytearray(range(17)), dtype=torch.float32, offset=1),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: X.to(torch.complex64).conj(),
    "negative": lambda: X.to(torch.complex64).conj().imag,
    "zeros without memory": lambda: untyped._efficientzerotensor((2, 3)),
    "no memory": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: X.to_sparse(),
    "of a class": lambda: X.as_subclass(type("Own", (Tensor,), {})),
}


@pytest.mark.parametrize("name", READABLE)
def test_elements_by_strides(name: str):
    x = READABLE[name].detach()
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    found = array_of(READABLE[name], x.ndim)
    assert found.dtype == np.dtype(f"u{x.element_size()}")
    assert found.tolist() == (x.contiguous().view(bits).to(torch.int64) % 2 ** (8 * x.element_size())).tolist()


def test_dims_behind_are_one_element():
    found = array_of(X, 2)
    assert (found.shape, found.dtype) == ((2, 3), np.dtype("V16"))
    assert np.frombuffer(found[1, 2].tobytes(), np.float32).tolist() == X[1, 2].tolist()
    assert array_of(X[:, :, ::2], 2) is None
    assert array_of(X.transpose(1, 2), 1) is None
    assert array_of(X[:, :1].transpose(1, 2), 1).dtype == np.dtype("V16")


@pytest.mark.parametrize("name", OTHERS)
def test_memory_that_does_not_say_what_it_is(name: str):
    x = OTHERS[name]()
    assert array_of(x, x.ndim) is None


def test_transforms():
    for transform in (torch.vmap, torch.func.functionalize):
        transform(lambda x: [array_of(x, x.ndim), x][1])(X)

    def plain(x: Tensor) -> Tensor:
        assert array_of(x, x.ndim) is None
        return x.sum()

    torch.vmap(plain)(X)
    torch.func.grad(plain)(X)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch):
    def missing(self: Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    for name in ("ndarray", "elements_of"):
        monkeypatch.setattr(arrays, name, getattr(arrays, name).__wrapped__)
    monkeypatch.setattr(Tensor, "numpy", missing)
    assert array_of(X, 3) is None


def test_ndarray():
    assert ndarray() is np.ndarray
