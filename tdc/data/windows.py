"""windows: documents cut where windows of N tokens end, so that every batch has as many tokens.

    documents   [0 1 2 3 4 5 6] [7 8 9] [10 11]
    windows of 4 tokens          0 1 2 3 | 4 5 6 7 | 8 9 10 11
    rows                        [0 1 2 3] [4 5 6] [7] [8 9] [10 11]

A window is some rows that follow one another. Attention, positions and scans stay within rows, so that no token sees
another document, and no mask is needed for it.

Invariant: values are those of the documents, in memory as well; only offsets are new.
"""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.keys import show
from tdc.core.typing import NestedKey
from tdc.data.epochs import whole_number
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.combine import named_leaves
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.tensordict import TensorDict

OP = "data.windows"


def windows(td: TensorDict, tokens: int, key: NestedKey) -> TensorDict:
    """Documents cut into rows, so that windows of `tokens` tokens end where a row ends.

    The tokens of all documents count on from one to the next. `tdc.data.loader(rows, max_tokens=tokens, key=key,
    consecutive=True)` then gives batches of exactly so many tokens, all but the last one, and shuffles whole windows.
    A model that is compiled once meets one number of tokens, without padding and without a token left out.

    Shapes:
        `key` (B, -1, ...) -> (P, -1, ...), where B <= P <= B + N / tokens, of N tokens.

    Args:
        td: documents, one in each row; also one that is mapped from a store.
        tokens: tokens of a window, 1 or more.
        key: the ragged leaf that is cut. So are all others whose rows are as long, such as labels.

    Returns:
        A TensorDict of P rows. Leaves of another kind have the entry of its document for each row. Cut leaves share
        memory with the documents. Documents without a token have no row.

    Raises:
        ShapeError: several batch dims; a key whose rows are ragged in several dims, or in another dim than the first.
        DtypeError: a key that holds no NestedTensor.
        KeyPathError: a key that is not there.
        StructureError: a padded leaf beside it, which cannot be cut in place.

    Compile:
        Eager only; reads the offsets on the host.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> td = TensorDict({"tokens": pack([torch.arange(7), torch.arange(7, 10)]), "id": torch.tensor([5, 6])}, [2])
        >>> rows = windows(td, 4, "tokens")
        >>> rows["tokens"].tolist(), rows["id"]
        ([[0, 1, 2, 3], [4, 5, 6], [7], [8, 9]], tensor([5, 5, 6, 6]))
    """
    expect(OP, td, TensorDict)
    tokens = whole_number(OP, 1, "tokens", tokens)
    if len(td._size) != 1:
        raise ShapeError(
            message(OP, "one batch dim, of documents", f"batch_size {list(td.batch_size)}", hint="td.flatten()")
        )
    whole = documents_at(td, key).structure
    ends = torch.arange(0, int(whole.offsets[-1]), tokens, device=whole.offsets.device)
    offsets = torch.cat([whole.offsets, ends]).unique()
    documents = torch.searchsorted(whole.offsets, offsets[:-1], right=True) - 1
    longest = int(offsets.diff().max()) if len(documents) else 0
    rows = Structure(offsets, None, extent_of((longest,), offsets.device)).marked()
    cut = {path: x for path, x in td.items(True, True) if is_cut(show(path), x, whole)}
    found = td.exclude(*cut)[documents]
    for path, x in cut.items():
        found = found.set(path, build_nested(rows.moved(x.structure.packed_dim, x.structure.batch_dim), x.values))
    return found.select(*td.keys(True, True))


def documents_at(td: TensorDict, key: Any) -> NestedTensor:
    """The leaf that is cut."""
    found = unwrap(named_leaves(OP, td, [key])[1][0])
    if not isinstance(found, NestedTensor):
        hint = "tdc.data.ragged_stack makes ragged leaves, x.to_packed() of padded ones"
        raise DtypeError(message(OP, f"a NestedTensor at {show(key)!r}", describe(found), hint=hint))
    if found.structure.ragged_ndim > 1 or found.structure.ragged_dims != (1,):
        expected, hint = "documents (B, -1, ...)", "the leaf of tokens as key="
        raise ShapeError(message(OP, expected, describe(found), hint=hint))
    return found


def is_cut(name: str, x: Any, whole: Structure) -> bool:
    """True if a leaf has one entry for each token."""
    if isinstance(x, MaskedBatch):
        hint = f"td.set({name!r}, td[{name!r}].to_packed()) first"
        raise StructureError(message(OP, "packed leaves", f"a padded one at {name!r}", hint=hint))
    if not isinstance(x, NestedTensor) or x.structure.ragged_dims != (1,):
        return False
    offsets = x.structure.offsets
    return offsets is whole.offsets or torch.equal(offsets, whole.offsets)
