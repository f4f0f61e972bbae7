"""Batches of tokens as tokenizers of Hugging Face make them and models there take them.

    {"input_ids": (B, L), "attention_mask": (B, L)}    <->    TensorDict {"input_ids": NestedTensor (B, -1)}
    {"input_ids": (1, N), "cu_seq_lens_q": (B+1,)}      ->    the same, of rows that are packed already

Nothing is imported: a `BatchEncoding` is a mapping, a dict goes into a model as keywords.

Invariant: `from_hf(to_hf(x, side=...))` has the tokens of `x`, for both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, keys_of
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.layout.padding import shift_rows
from tdc.layout.segments import offsets_of
from tdc.layout.structure import Structure, extent_of, require_same
from tdc.ragged.convert import to_padded
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.tensordict import TensorDict

OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # of packed rows
TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "special_tokens_mask", "offset_mapping")


def from_hf(encoding: Mapping[str, Any], *, keys: Iterable[str] = ()) -> TensorDict:
    """Padded tokens and their attention mask as NestedTensors of one structure.

    Shapes:
        `(B, L, ...) -> (B, -1, ...)` of entries of tokens; others `(B, ...)` stay as they are. Of packed rows
        `(1, N, ...) -> (B, -1, ...)`, without a copy, labels included.

    Args:
        encoding: what a tokenizer returns with `return_tensors="pt"`, padded on the left or on the right; or what
            `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` returns.
        keys: entries of tokens besides those of tokenizers, such as `["labels"]`. None is recognised by its sizes.

    Returns:
        A TensorDict without the attention mask, which the lengths stand for. The longest length is that of the padding.

    Raises:
        KeyPathError: no attention mask, or a key that is not there.
        DtypeError: a mask of floating-point numbers.
        ShapeError: a mask that is not `(B, L)`, or entries of tokens that do not begin with its sizes; each is named.

    Compile:
        Reads the number of tokens on the host: call it in the data loader.

    Example:
        >>> mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> td = from_hf({"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": mask})
        >>> td["input_ids"].tolist()
        [[5, 6], [7, 8, 9]]
    """
    expect("interop.from_hf", encoding, Mapping, of=" of tensors")
    if "cu_seq_lens_q" in encoding:
        return from_packed(encoding, keys_of("interop.from_hf", keys))
    mask = encoding.get("attention_mask")
    keys = keys_of("interop.from_hf", keys)
    absent = [key for key in keys if key not in encoding]
    if mask is None or absent:
        hint = "tokenizer(texts, padding=True, return_tensors='pt')"
        got = f"keys {sorted(encoding)}"
        raise KeyPathError(message("interop.from_hf", f"the key {(absent or ['attention_mask'])[0]!r}", got, hint=hint))
    check_mask(mask)
    names = [key for key in encoding if key in {*TOKENS, *keys}]
    wrong = {key: describe(encoding[key]) for key in names if tuple(encoding[key].shape[:2]) != tuple(mask.shape)}
    if wrong:  # else a graph would take the sizes in the text for constants
        expected, hint = f"tokens of {list(mask.shape)}", "pad all entries of tokens alike"
        refuse_wrong(ShapeError, "interop.from_hf", expected, wrong, "others", hint)
    real = mask.bool()
    positions = real.flatten().nonzero().squeeze(1)
    structure = Structure(offsets_of(real.sum(1)), None, extent_of((mask.shape[1],), mask.device)).marked()
    entries = {key: value for key, value in encoding.items() if key != "attention_mask"}
    for key in names:
        entries[key] = build_nested(structure, entries[key].flatten(0, 1).index_select(0, positions))
    return TensorDict(entries, (mask.shape[0],))


def from_packed(encoding: Mapping[str, Any], keys: Iterable[str]) -> TensorDict:
    """Rows that transformers has packed, `(1, N, ...)` with int32 offsets, as NestedTensors of one structure."""
    structure = Structure(encoding["cu_seq_lens_q"].to(torch.int64)).marked()
    names = [key for key in encoding if key in {*TOKENS, "labels", *keys}]
    first = encoding[names[0]] if names else None
    total = first.shape[1] if isinstance(first, Tensor) and first.ndim > 1 else 0
    wrong = {key: describe(encoding[key]) for key in names if tuple(encoding[key].shape[:2]) != (1, total)}
    if wrong or not names:
        hint = "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        got = f"{len(wrong)} others" if names else f"keys {sorted(encoding)}"
        raise ShapeError(message("interop.from_hf", "packed tokens (1, N)", got, wrong, hint))
    entries = {key: value for key, value in encoding.items() if key not in OFFSETS}
    for key in names:
        entries[key] = build_nested(structure, entries[key][0])
    return TensorDict(entries, (structure.batch_size,))


def to_hf(
    batch: NestedTensor | TensorDict, *, side: str = "right", pad: Any = 0, length: int | None = None
) -> dict[str, Any]:
    """Packed tokens as the keywords of a model of Hugging Face: padded, with attention mask and position ids.

    Shapes:
        `(B, -1, ...) -> (B, L, ...)`; mask and position ids `(B, L)` int64.

    Args:
        batch: tokens, or a TensorDict of packed leaves of one structure; its other leaves are passed on.
        side: where padding goes: "right" for training, "left" for generation.
        pad: what padding holds, such as the tokenizer's `pad_token_id`; a dict of that for keys, 0 for others.
        length: padded length; the longest row by default.

    Returns:
        A dict. A NestedTensor of numbers becomes "inputs_embeds", one of tokens "input_ids".

    Raises:
        StructureError: nothing packed, or leaves of different structures.
        ShapeError: a side that is none, or rows that are ragged in other dims than the first.

    Compile:
        One graph for all lengths, where the batch carries its longest length.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> out = to_hf(pack([torch.tensor([5]), torch.tensor([7, 8])]), side="left")
        >>> out["input_ids"], out["attention_mask"], out["position_ids"]
        (tensor([[0, 5],
                [7, 8]]), tensor([[0, 1],
                [1, 1]]), tensor([[0, 0],
                [0, 1]]))
    """
    if isinstance(batch, NestedTensor):
        batch = TensorDict({"inputs_embeds" if batch.dtype.is_floating_point else "input_ids": batch}, (len(batch),))
    expect("interop.to_hf", batch, TensorDict, NestedTensor, Mapping)
    out: dict[str, Any] = dict(Keyed.items(batch) if isinstance(batch, TensorDict) else batch.items())
    ragged = {key: x for key, x in out.items() if isinstance(x, NestedTensor)}
    if not ragged:
        got, hint = describe(batch), "tdc.pack(rows), or tdc.interop.from_hf(encoding)"
        raise StructureError(message("interop.to_hf", "a NestedTensor of tokens", got, hint=hint))

    def padded(x: NestedTensor, fill: Any) -> Tensor:
        found = to_padded(x, fill, length=length)
        return shift_rows(found.data, found.lengths[:, 0], side, "interop.to_hf", back=True)

    first = next(iter(ragged.values()))
    for key, x in ragged.items():
        if x.ragged_dims != (1,):
            got, hint = f"ragged dims {x.ragged_dims}", "transpose it, or td.exclude(key)"
            raise ShapeError(message("interop.to_hf", "rows (B, -1, ...)", got, {key: describe(x)}, hint))
        require_same(first.structure, x.structure, "interop.to_hf")
        out[key] = padded(x, pad.get(key, 0) if isinstance(pad, Mapping) else pad)
    mask = padded(first.with_values(first.values.new_ones(first.values.shape[:1], dtype=torch.int64)), 0)
    return out | {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def check_mask(mask: Any) -> None:
    """An attention mask is (B, L), of bool or whole numbers."""
    if not isinstance(mask, Tensor) or mask.dtype.is_floating_point or mask.dtype.is_complex:
        hint = "return_tensors='pt'; 1 is a token, 0 padding"
        raise DtypeError(message("interop.from_hf", "an attention mask of bool or int", describe(mask), hint=hint))
    if mask.ndim != 2:
        hint = "the mask of the tokenizer; masks of attention scores say more than lengths can"
        raise ShapeError(message("interop.from_hf", "an attention mask (B, L)", describe(mask), hint=hint))
