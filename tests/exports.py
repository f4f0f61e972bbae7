"""What the tests of export share: batches, a model, its export with dims by name, and files that are tampered with."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, TensorDict
from tdc.compile import Exported, export


def rows(*lengths: int) -> NestedTensor:
    return tdc.pack([torch.randn(n, 3) for n in lengths])


def batch(*lengths: int) -> TensorDict:
    return TensorDict({"x": rows(*lengths), "meta": {"id": torch.arange(len(lengths))}}, [len(lengths)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, td: TensorDict, *, bias: Tensor) -> Any:
        h = self.linear(td["x"]) * self.scale
        return {"mean": h.mean(1) + bias, "parts": (h, [h.to_padded(), None]), "td": td.set("h", h), "k": 3}


def export_model(model: Model) -> Exported:
    sizes = {"batch": ("B", 0, 8), "x": {"length": ("L", 0, 7)}}
    return export(model, (batch(3, 2, 5),), {"bias": torch.ones(2)}, dynamic={"td": sizes, "bias": False})


def the_same(got: Any, want: Any) -> None:
    mine, spec = pytree.tree_flatten(got)
    theirs, other = pytree.tree_flatten(want)
    assert spec == other
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def meta(path: Path, **changes: Any) -> dict[str, Any]:
    """The entry of a file that says what it is; with changes, written back."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(n for n in entries if n.endswith("extra/tdc.json"))
    data = json.loads(entries[name])
    if changes:
        entries[name] = json.dumps(data | changes).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for n, content in entries.items():
                archive.writestr(n, content)
    return data
