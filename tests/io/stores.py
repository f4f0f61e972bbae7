"""What the tests of stores share: a TensorDict with every kind of leaf, and manifests that are rewritten."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tdc
from tdc import MaskedBatch, NestedTensor, ObjectArray, Static, TensorDict
from tdc.interop import spec

Change = Callable[[dict[str, Any]], Any]


@tdc.tensorclass
class Point:
    """A tensorclass of a user."""

    xy: Tensor
    name: str = "here"


def every_kind() -> TensorDict:
    """Three examples with a leaf of each kind, ties, inner nodes and Static values."""
    text = tdc.pack([torch.ones(2, 5), torch.ones(0, 5), torch.ones(3, 5)])
    images = tdc.pack([torch.rand(2, 3), torch.rand(0, 1), torch.rand(4, 2)], ragged_dim=(1, 2))
    weight = torch.arange(12.0).view(3, 4)
    return TensorDict(
        {
            "weight": weight, "tied": weight, "text": text, "labels": text.sum(2), "images": images,
            "padded": text.to_padded(), "caption": ObjectArray(["a", {"k": [1, 2.5]}, None]),
            "split": Static(("train", 1, None, (2.5, True))), "point": Point(torch.zeros(3, 2), batch_size=[3]),
            "info": TensorDict({"q": torch.rand(3, 4, 2), "deep": {"id": torch.arange(12).view(3, 4)}}, [3, 4]),
            "empty": {},
        },
        [3],
    )  # fmt: skip


def tensors(leaf: Any) -> list[Tensor]:
    """The tensors that a leaf is made of."""
    if isinstance(leaf, NestedTensor):
        s = leaf.structure
        return [leaf.values, s.offsets, *([] if s.shapes is None else [s.shapes])]
    return [leaf.data, leaf.lengths] if isinstance(leaf, MaskedBatch) else [leaf] if isinstance(leaf, Tensor) else []


def same(a: TensorDict, b: TensorDict) -> bool:
    """Whether two TensorDicts are equal bit by bit: keys, kinds, dtypes, content, nodes, Static values."""
    if a.batch_size != b.batch_size or spec(a.exclude("caption")) != spec(b.exclude("caption")):
        return False
    if list(a.keys()) != list(b.keys()) or a.keys(True, sort=True) != b.keys(True, sort=True):
        return False
    for key in a.keys(True, True):
        x, y = a[key], b[key]
        if isinstance(x, ObjectArray):
            if not isinstance(y, ObjectArray) or x.tolist() != y.tolist():
                return False
        elif not all([same_bits(s, t) for s, t in zip(tensors(x), tensors(y), strict=True)]):
            return False
    return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.numel() == 0 or torch.equal(*raw)


def root_of(store: Path) -> dict[str, Any]:
    """The root of the manifest of a store."""
    return json.loads((store / "meta.json").read_bytes())["root"]


def sealed(root: Any, **head: Any) -> bytes:
    """A manifest of a root, with the right digest."""
    text = json.dumps(root, separators=(",", ":"))
    top = {"format": "tdc.store", "version": 1, "sha256": hashlib.sha256(text.encode()).hexdigest(), **head}
    return json.dumps({**top, "root": root}, separators=(",", ":")).encode()


def entry(root: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        root = root["entries"][key]
    return root


def put(*keys: str, **fields: Any) -> Change:
    """Give an entry other fields."""
    return lambda root: entry(root, *keys).update(fields)


def rewrite(store: Path, change: Change) -> None:
    """Change the root of a manifest, as somebody who knows the format would."""
    root = root_of(store)
    changed = change(root)
    (store / "meta.json").write_bytes(changed if isinstance(changed, bytes) else sealed(root))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of everything below a folder; of what is no file, nothing is read."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        found[str(path)] = (mode, path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
    return found


WATCHED: list[list[str]] = []  # a hook cannot be taken away, only told to be quiet


def watch(event: str, args: tuple[Any, ...]) -> None:
    if WATCHED and event == "open":
        WATCHED[-1].append(os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else f"{args[0]}")


sys.addaudithook(watch)


@contextmanager
def opened_outside(store: Path) -> Iterator[list[str]]:
    """What the block opens besides the store and, by their bare names, what is in it; known when the block ends."""
    opened: list[str] = []
    strangers: list[str] = []
    WATCHED.append(opened)
    try:
        yield strangers
    finally:
        WATCHED.pop()
        strangers += [name for name in opened if name != str(store) and ("/" in name or name in (".", ".."))]
