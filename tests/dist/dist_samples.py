"""Structures of every kind that ranks exchange, each with other rows and lengths on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tdc
from tdc import NestedTensor, ObjectArray, Static, TensorDict


@tdc.tensorclass
class Point:
    x: Tensor
    y: Tensor
    label: str = "none"


@tdc.tensorclass
class Scene:
    points: Point
    weight: Tensor


def numbers(rank: int, *size: int) -> Tensor:
    """Small whole numbers as floats, of which sums are exact."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 8, size, generator=generator).float()


def texts(rank: int, n: int, *features: int) -> NestedTensor:
    """A ragged batch of n examples, some of them empty."""
    if not n:
        return NestedTensor(numbers(rank, 0, *features), torch.zeros(1, dtype=torch.int64))
    return tdc.pack([numbers(rank + i, (i * 7 + rank * 3) % 5, *features) for i in range(n)])


def images(rank: int, n: int) -> NestedTensor:
    return tdc.pack([numbers(rank + i, 2, i + 1, (rank + i) % 3 + 1) for i in range(n)], ragged_dim=(2, 3))


def documents(rank: int, n: int) -> Any:
    return tdc.pack([tdc.pack([numbers(i + j, (i + j + rank) % 3 + 1) for j in range(i + 1)]) for i in range(n)])


def plain(rank: int, n: int) -> TensorDict:
    inner = {"id": torch.arange(n) + 10 * rank}
    return TensorDict({"x": numbers(rank, n, 3), "y": numbers(rank + 1, n), "info": inner}, [n])


def dtypes(rank: int, n: int) -> TensorDict:
    x = numbers(rank, n, 2)
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64")
    leaves: dict[str, Tensor] = {name: x.abs().to(getattr(torch, name)) for name in names}
    leaves |= {"complex64": x.to(torch.complex64), "complex128": x * 1j}
    leaves["float8"] = x.to(torch.float8_e4m3fn)
    leaves["unsigned"] = x.abs().to(torch.int32).to(torch.uint16)
    return TensorDict(leaves, [n])


def layouts(rank: int, n: int) -> TensorDict:
    """Without features, with none at all, transposed, expanded, conjugated, and cut out."""
    whole = numbers(rank, n, 4, 5)
    return TensorDict(
        {
            "empty": whole[:, :0], "turned": whole.transpose(1, 2), "cut": whole[:, 1:3, ::2],
            "wide": numbers(rank, n, 1).expand(n, 6), "conj": (whole + 1j * whole).conj(), "none": torch.zeros(n, 0, 3),
        },
        [n],
    )  # fmt: skip


def scalars(rank: int, n: int) -> TensorDict:
    """Without batch dims: parameters, and tensors without dims."""
    tied = numbers(rank, 3, 3)
    step = torch.tensor(rank)
    return TensorDict({"w": tied, "step": step, "scale": numbers(rank, 1)[0], "net": {"tied": tied, "empty": {}}})


def ragged(rank: int, n: int) -> TensorDict:
    text = texts(rank, n, 2)
    mask, inner = text.with_values(text.values[:, 0] > 0), {"t": texts(rank + 1, n)}
    return TensorDict({"text": text, "mask": mask, "label": torch.arange(n) + rank, "in": inner}, [n])


def several(rank: int, n: int) -> TensorDict:
    return TensorDict({"image": images(rank, n), "document": documents(rank, n)}, [n])


def padded(rank: int, n: int) -> TensorDict:
    return TensorDict({"text": texts(rank, n, 2).to_padded(), "x": numbers(rank, n)}, [n])


def objects(rank: int, n: int) -> TensorDict:
    names = [{"name": f"ä{rank}{i}", "tags": [i, None, 1.5]} for i in range(n)]
    static = {"split": Static("train"), "k": Static((1, "a"))}
    return TensorDict({"who": ObjectArray(names), "x": numbers(rank, n), **static}, [n])


def typed(rank: int, n: int) -> Any:
    points = Point(x=numbers(rank, n, 2), y=numbers(rank, n), label="seen", batch_size=[n])
    return Scene(points=points, weight=numbers(rank, n), batch_size=[n])


def inner(rank: int, n: int) -> TensorDict:
    """A node with more batch dims than the root, a typed node, and two batch dims."""
    node = TensorDict({"a": numbers(rank, n, 2, 3)}, [n, 2])
    return TensorDict({"node": node, "point": typed(rank, n).points}, [n])


def grid(rank: int, n: int) -> TensorDict:
    return TensorDict({"x": numbers(rank, n, 2, 3), "y": numbers(rank, n, 2)}, [n, 2])


KINDS: dict[str, Callable[[int, int], Any]] = {
    "plain": plain, "dtypes": dtypes, "layouts": layouts, "scalars": scalars, "ragged": ragged, "several": several,
    "padded": padded, "objects": objects, "typed": typed, "inner": inner, "grid": grid,
    "tensor": lambda rank, n: numbers(rank, n, 2), "number": lambda rank, n: torch.tensor(float(rank)),
    "nested": lambda rank, n: texts(rank, n, 2), "images": images, "documents": documents,
    "masked": lambda rank, n: texts(rank, n).to_padded(),
}  # fmt: skip
WITHOUT_ROWS = ("scalars", "number")
