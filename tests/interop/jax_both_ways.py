"""JAX's arrays as leaves and back; `test_dlpack` runs it."""

from __future__ import annotations

import jax
import torch

import tdc
from tdc import TensorDict
from tdc.interop import from_dlpack, to_dlpack

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


def both_ways(name: str) -> None:
    """Nothing is copied, in either direction, unless it is asked for."""
    x = torch.ones(6).to(getattr(torch, name)).view(3, 2)
    array = to_dlpack(TensorDict({"x": x}), jax.dlpack.from_dlpack)["x"]
    assert str(array.dtype) == name
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = from_dlpack({"x": array})["x"]
    assert back.dtype == x.dtype
    assert back.data_ptr() == x.data_ptr()
    assert from_dlpack({"x": array}, copy=True)["x"].data_ptr() != x.data_ptr()


def refused(td: TensorDict) -> str:
    """The error for a TensorDict that JAX would not take as it is."""
    try:
        to_dlpack(td, jax.dlpack.from_dlpack)
    except tdc.TdcError as error:
        return f"{type(error).__name__} {error}"
    return ""


if __name__ == "__main__":
    said = refused(TensorDict({"x": torch.arange(3)}))
    assert said.startswith("DtypeError tdc.interop.to_dlpack: expected arrays of the dtypes of the leaves"), said
    assert "at x: Tensor int64[3], as int32\nhint: " in said, said
    jax.config.update("jax_enable_x64", True)
    for dtype in DTYPES:
        both_ways(dtype)
    assert "requires a gradient" in refused(TensorDict({"x": torch.ones(3, requires_grad=True)}))
    print(len(DTYPES), "dtypes")
