"""Ragged arguments of a model as the one packed sequence that it is called with.

    input_ids, position_ids, token_type_ids, labels  NestedTensor (B, -1)      ->  (1, N)
    inputs_embeds                                    NestedTensor (B, -1, D)   ->  (1, N, D)

Positions begin anew with each row. Labels of a causal model are shifted by the model; the first of each row is the
label of no position, so it becomes -100, and the loss is that of the rows.

transformers' own packed form (1, N), as `DataCollatorWithFlattening` makes it, is taken as well. It is recognized by
`cu_seq_lens_q` or `cu_seq_lens_k`, or by `position_ids` that begin anew. Its outputs stay (1, N, ...), so that a
Trainer needs no containers.

Invariants: one structure for all; nothing that a model would read over the ends of rows is let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.annotations import python_signature
from tdc.core.asserts import require
from tdc.core.dynamo import readable
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.hf.attention import OP, Packed
from tdc.interop.huggingface import OFFSETS
from tdc.layout.padding import pad_rows, valid_mask
from tdc.layout.segments import lengths_of, local_positions, longest, sizes_of
from tdc.layout.structure import Structure, extent_of, require_same
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.tensordict import TensorDict

ASKED = "tdc_asked"  # the argument by which `check` asks for a list of the calls of attention
BELOW = "tdc_packed"  # the argument by which a head hands packed inputs on to the model below it
IGNORED = -100  # the label that transformers' losses leave out
OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
LABELS = ("labels", "shift_labels")  # of heads of tokens
FLAT = ("cu_seq_lens_q", "cu_seq_lens_k")  # the offsets in transformers' packed form
COLLATOR = "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
REFUSED = {  # arguments that have no meaning for packed rows, and what to do instead
    "attention_mask": "leave it out: the rows have lengths",
    "cache": "to_hf(batch, side='left') for generation",
    "past_key_values": "to_hf(batch, side='left') for generation",
    "use_cache": "use_cache=False, and to_hf(batch, side='left') for generation",
    "output_attentions": "leave it out: there are no weights of all pairs",
    "output_router_logits": "leave it out: the load of experts is that of the whole batch",
    "logits_to_keep": "take the logits that you want from the output",
    "start_positions": "the loss from the logits: over a padded row it would count padding",
    "end_positions": "the loss from the logits: over a padded row it would count padding",
    "decoder_attention_mask": "leave it out: the rows have lengths",
    "encoder_outputs": "input_ids: the encoder is called with the same rows",
    "encoder_hidden_states": "a model of encoder and decoder, with input_ids and decoder_input_ids",
}


class Head(NamedTuple):
    """Facts about a model.

    Args:
        names: the arguments of its forward, in order.
        of_rows: its head gives one result for each row, so that it needs rows.
        causal: its loss shifts labels.
        first: the first position; RoBERTa begins behind its padding index.
        pad: the token that padding consists of.
        below: the arguments of the model below the head, in order.
        last: its head takes the last token of each row, which it finds by input_ids.
    """

    names: tuple[str, ...]
    of_rows: bool
    causal: bool
    first: int
    pad: int
    below: tuple[str, ...]
    last: bool


def parameters_of(model: Any) -> tuple[str, ...]:
    """The names of the arguments of a model, in order."""
    found = python_signature(model.forward).parameters.values()
    return tuple([p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)])


def packed_arguments(head: Head, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call on ragged batches, packed; None where nothing is ragged."""
    given = named(args, kwargs, head.names)
    ragged = ragged_of(given)
    offsets = None if ragged else flat_offsets(given)
    if offsets is not None:
        given = nested_arguments(given, head, offsets)
        ragged = ragged_of(given)
    if not ragged:
        return None
    tokens, rows = check_arguments(given, ragged, head)
    total = tokens.values.shape[0]
    positions = local_positions(rows, total)[None]
    out = {name: x.values[None] if isinstance(x, NestedTensor) else x for name, x in given.items()}
    asked: Any = out.pop(ASKED, None)
    if head.causal and "labels" in ragged:
        out["labels"] = out["labels"].masked_fill(positions == 0, IGNORED)
    if "position_ids" in head.below:
        out.setdefault("position_ids", positions + head.first)
    if "use_cache" in head.names:
        out["use_cache"] = False
    packed = Packed(rows, rows, (total, total), None, asked, None, offsets is not None)
    return padded_arguments(head, packed, given, out) if head.of_rows else out | {"attention_mask": packed}


def flat_offsets(given: dict[str, Any]) -> Tensor | None:
    """Offsets of rows in transformers' packed form, (B+1,); None for another call."""
    found = [given[name] for name in FLAT if name in given]
    if len(found) == 2 and found[0] is not found[1]:
        text = message(OP, f"{' and '.join(FLAT)} that are equal", "others", hint="a batch of its own for each")
        if found[0].shape != found[1].shape:
            raise ShapeError(text)
        require((found[0] == found[1]).all(), text, ShapeError)
    return found[0] if found else restarts(given)


def restarts(given: dict[str, Any]) -> Tensor | None:
    """Offsets of the rows of positions (1, N) that begin anew, where there are no offsets; None of one row.

    A graph cannot have so many rows as data says, so there positions of one row are asserted.
    """
    positions, tokens = given.get("position_ids"), given.get("input_ids", given.get("inputs_embeds"))
    padded = any([name in given for name in ("attention_mask", "cache", "past_key_values")])
    if padded or not isinstance(positions, Tensor) or not isinstance(tokens, Tensor):
        return None
    if positions.shape != tokens.shape[:2] or positions.shape[0] != 1:
        return None
    back = positions[0, 1:] <= positions[0, :-1]
    if not readable():
        text = message(OP, "cu_seq_lens_q beside position_ids that begin anew, in a graph", "none", hint=COLLATOR)
        require(~back.any(), text, ShapeError)
        return None
    begins = back.nonzero()[:, 0] + 1
    ends = begins.new_tensor([0]), begins, begins.new_tensor([positions.shape[1]])
    return torch.cat(ends) if len(begins) else None


def nested_arguments(given: dict[str, Any], head: Head, offsets: Tensor) -> dict[str, Any]:
    """transformers' packed form (1, N) as ragged arguments."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[0] != 1:
        hint = f"{COLLATOR}, or a NestedTensor"
        raise ShapeError(message(OP, f"tokens (1, N) beside {FLAT[0]}", describe(tokens), hint=hint))
    bound, offsets = given.get("max_length_q", given.get("max_length_k")), offsets.long()
    rows = Structure(offsets, None, None if bound is None else extent_of((int(bound),), offsets.device))
    names = OF_TOKENS if head.of_rows else (*OF_TOKENS, *LABELS)
    rest = {name: x for name, x in given.items() if name not in OFFSETS}
    if isinstance(positions := given.get("position_ids"), Tensor):
        ours = local_positions(rows, tokens.shape[1]) + head.first
        hint = f"DataCollatorWithFlattening(position_ids_start={head.first})"
        text = message(OP, f"position_ids that begin with {head.first} in each row", "others", hint=hint)
        require((positions == ours).all(), text, ShapeError)
        rest.pop("position_ids")  # they say no more than the rows
    return {n: build_nested(rows, x[0]) if n in names and isinstance(x, Tensor) else x for n, x in rest.items()}


def named(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """All arguments by name; a TensorDict as the first stands for its entries. None is no argument."""
    if args and isinstance(args[0], (TensorDict, Mapping)):
        args, kwargs = args[1:], {**dict(args[0].items()), **kwargs}
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: x for name, x in given.items() if x is not None}


def ragged_of(given: dict[str, Any]) -> dict[str, NestedTensor]:
    """The arguments that are packed, or a StructureError where one is padded."""
    masked = {name: describe(x) for name, x in given.items() if isinstance(x, MaskedBatch)}
    if masked:
        hint = "x.to_packed(), or to_hf(x.to_packed()) for a padded call"
        raise StructureError(message(OP, "NestedTensors or tensors", "MaskedBatches", masked, hint))
    return {name: x for name, x in given.items() if isinstance(x, NestedTensor)}


def check_arguments(
    given: dict[str, Any], ragged: dict[str, NestedTensor], head: Head
) -> tuple[NestedTensor, Structure]:
    """The tokens and the structure of all ragged arguments, or an error that says which does not fit."""
    tokens = ragged.get("input_ids", ragged.get("inputs_embeds"))
    if tokens is None:
        got = f"ragged {', '.join(ragged)}"
        raise KeyPathError(message(OP, "input_ids or inputs_embeds as a NestedTensor", got, hint="model(input_ids=x)"))
    if head.last and "inputs_embeds" in ragged:
        hint = "input_ids, by which transformers finds the last token of a row"
        raise UnsupportedError(message(OP, "input_ids for this head", "inputs_embeds", hint=hint))
    check_options(given)
    if head.of_rows and "labels" in ragged:
        hint = "labels (B,), one for each row"
        got = {"labels": describe(ragged["labels"])}
        raise StructureError(message(OP, "labels of rows", "labels of tokens", got, hint))
    check_rows(ragged, tokens)
    refuse_dense(given, OF_TOKENS if head.of_rows else (*OF_TOKENS, *LABELS))
    return tokens, tokens.structure


def refuse_dense(given: dict[str, Any], names: tuple[str, ...]) -> None:
    """A StructureError where one of the names is no NestedTensor, and tokens are."""
    dense = {n: describe(given[n]) for n in names if n in given and not isinstance(given[n], NestedTensor)}
    if dense:
        hint = "tokens.with_values(...), or from_hf(encoding, keys=['labels'])"
        raise StructureError(message(OP, "NestedTensors of the structure of the tokens", "others", dense, hint))


def check_options(given: dict[str, Any]) -> None:
    """An UnsupportedError for an argument that has no meaning for packed rows."""
    for name, hint in REFUSED.items():
        x = given.get(name)
        if x is not None and not (isinstance(x, (bool, int)) and not x):
            raise UnsupportedError(message(OP, f"a ragged batch without {name}", describe(x), hint=hint))
    if given.get("return_dict") is False:
        hint = "output.to_tuple()"
        raise UnsupportedError(message(OP, "a ragged batch without return_dict=False", "it", hint=hint))


def check_rows(ragged: dict[str, NestedTensor], tokens: NestedTensor) -> None:
    """An error for what is not (B, -1), or (B, -1, D) of vectors, of the structure of the tokens and of its dtype."""
    for name, x in ragged.items():
        ndim = 3 if name.endswith("inputs_embeds") else 2
        if x.ndim != ndim or x.ragged_dims != (1,):
            hint = "one row of tokens for each example; td.exclude(name) for what the model does not take"
            expected = f"{name} (B, -1{', D' if ndim == 3 else ''})"
            raise ShapeError(message(OP, expected, describe(x), {name: describe(x)}, hint))
        require_same(tokens.structure, x.structure, OP, f"{name} of the structure of the tokens: x.with_values(...)")
        if name.endswith("input_ids") and (x.dtype.is_floating_point or x.dtype.is_complex):
            hint = f"{name.replace('input_ids', 'inputs_embeds')}=x for vectors"
            raise DtypeError(message(OP, f"{name} of whole numbers", describe(x), hint=hint))


def padded_arguments(head: Head, packed: Packed, given: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a head of rows: padded tokens and their mask, and the packed inputs of the model below."""
    rows = packed.keys
    text = message(OP, "rows with tokens", "an empty row", hint="leave empty rows out: they have no result")
    require((lengths_of(rows) > 0).all(), text, ShapeError)
    shape = longest(rows)
    inputs = {name: x for name, x in out.items() if name in OF_TOKENS and name in head.below}
    kept = {name: x for name, x in out.items() if name not in OF_TOKENS}
    for name in ("input_ids", "inputs_embeds"):
        if name in given:
            kept[name] = pad_rows(given[name].values, rows, shape, head.pad if name == "input_ids" else 0)
    kept["attention_mask"] = valid_mask(sizes_of(rows), shape).long()
    return kept | {BELOW: packed.with_inputs(inputs)}


def packed_below(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of the model below a head; None where its batch is not packed."""
    given = named(args, kwargs, names)
    packed = given.pop(BELOW, None)
    if packed is None:
        return given if isinstance(given.get("attention_mask"), Packed) else None
    rest = {name: x for name, x in given.items() if name not in OF_TOKENS}
    return {**rest, **packed.inputs, "attention_mask": packed}
