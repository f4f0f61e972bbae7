"""collate: samples of a dataset as one batch, for a DataLoader. Keys that are ragged or padded are named, the rest is
stacked.

Samples are TensorDicts, or mappings and records of tensors, numbers and other Python objects.

Invariants: those of `pad_sequence`; the number and the kind of leaves do not depend on the sizes of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tdc.core.container import Container
from tdc.core.errors import StructureError, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import Dims, KeyPath, NestedKey
from tdc.data.pad_sequence import as_batch, check_fills, checked, dims_of, pad, stack_leaves
from tdc.interop.records import as_tensordict, is_record
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.leaf import PROTOCOLS
from tdc.tensordict.nodes import Static
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.storage import is_tensordict, same_keys, same_size
from tdc.tensordict.tensordict import TensorDict, build_td


def collate(
    samples: Sequence[Any],
    *,
    ragged_keys: Iterable[NestedKey] | Mapping[NestedKey, Dims] = (),
    pad_keys: Iterable[NestedKey] | Mapping[NestedKey, Dims] = (),
    value: float = 0,
) -> TensorDict:
    """A batch of samples, for `DataLoader(dataset, collate_fn=tdc.data.collate)`.

    Shapes:
        n samples of batch size `S` -> batch size `(n, *S)`.

    Args:
        samples: TensorDicts, or mappings and records: numbers are stacked, too, and strings and other objects of
            mappings become ObjectArrays. A TensorDict, fetched whole by a DataLoader, comes back as it is.
        ragged_keys: leaves that become NestedTensors: a list, or a dict of the dims in which samples differ, counted in
            the batch, so that 1 is the first dim of a sample. `functools.partial(collate, ragged_keys=["tokens"])`.
        pad_keys: leaves that become MaskedBatches, in the same way.
        value: what padding holds.

    Raises:
        StructureError: no samples, other keys or other Static values in one of them, a key both ragged and padded.
        ShapeError: leaves that differ in a dim that was not named; every key is named.
        DtypeError: leaves that differ in dtype, but for empty lists; a value that is no number.
        KeyPathError: a key that is not there.

    Compile:
        Traceable, the number of samples fixed; runs in workers of a DataLoader.

    Example:
        >>> import torch
        >>> samples = [{"tokens": torch.arange(n), "label": n, "name": f"no. {n}"} for n in (1, 3)]
        >>> batch = collate(samples, ragged_keys=["tokens"])
        >>> batch["tokens"].shape, batch["label"], batch["name"].tolist()
        (torch.Size([2, -1]), tensor([1, 3]), ['no. 1', 'no. 3'])

    Source:
        `torch.utils.data.default_collate`.
    """
    if is_tensordict(samples):
        return samples  # type: ignore[return-value]  # what `__getitems__` of a TensorDict fetched
    found = checked("data.collate", samples)
    check_fills("data.collate", {"value": value})
    tds = as_samples(found)
    same_keys("data.collate", *tds)
    same_size("data.collate", *tds)
    ragged = dims_of("data.collate", tds[0], ragged_keys)
    padded = dims_of("data.collate", tds[0], pad_keys)
    twice = [show(p) for p in ragged if p in padded]
    hint = "leave it in one of the two"
    refuse_wrong(StructureError, "data.collate", "keys ragged or padded", twice, "that are both", hint)
    known: list[tuple[Any, MaskedBatch]] = []

    def convert(path: KeyPath, packed: NestedTensor) -> NestedTensor | MaskedBatch:
        return pad(packed, value, known) if path in padded else packed

    hint = "name keys of different sizes in ragged_keys= or pad_keys="
    leaves = stack_leaves("data.collate", tds, ragged | padded, convert, hint)
    return as_batch("data.collate", leaves, tds[0]._nodes, (len(tds), *tds[0].batch_size), tds[0].device)


def with_objects(sample: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping as entries of a TensorDict; whatever is no array, number, list or record is an ObjectArray."""
    return {key: value if isinstance(value, Tensor) else entry_of(value) for key, value in sample.items()}


def entry_of(value: Any) -> Any:
    """A value of a sample as a TensorDict takes it."""
    if isinstance(value, (Container, bool, int, float, complex, list, Static)) or type(value) in PROTOCOLS:
        return value
    if isinstance(value, Mapping):
        return with_objects(value)
    if is_record(value):
        return as_tensordict(value)
    return value if hasattr(value, "__array__") else ObjectArray([value], ())


def as_samples(samples: list[Any]) -> list[TensorDict]:
    """Samples as TensorDicts; empty lists, which say nothing of a dtype, have that of the other samples."""
    tds = [TensorDict(with_objects(x)) if isinstance(x, Mapping) else as_tensordict(x) for x in samples]
    empty = [[p for p in td._leaves if is_empty_list(sample, p)] for td, sample in zip(tds, samples, strict=True)]
    if not any(empty):
        return tds
    known = {p: x.dtype for td, gone in zip(tds, empty, strict=True) for p, x in td._leaves.items() if p not in gone}
    out = []
    for td, gone in zip(tds, empty, strict=True):
        leaves = {**td._leaves, **{p: td._leaves[p].to(known[p]) for p in gone if p in known}}
        out.append(build_td(leaves, td._nodes, td.batch_size, td.device))
    return out


def is_empty_list(sample: Any, path: KeyPath) -> bool:
    """True if a sample has an empty list at a path."""
    for key in parts(path):
        sample = sample.get(key) if isinstance(sample, Mapping) else None
    return isinstance(sample, list) and not sample
