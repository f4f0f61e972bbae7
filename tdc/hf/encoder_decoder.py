"""A model of encoder and decoder on ragged batches: sources and targets, whose rows have lengths of their own.

    sources   input_ids (B, -1), inputs_embeds (B, -1, D)                   ->  (1, N, ...)
              input_features (B, F, T)                                      as they are, all of one length
    targets   decoder_input_ids (B, -1), decoder_inputs_embeds (B, -1, D)   ->  (1, M, ...)
              labels (B, -1)                                                ->  (M, 1)

The encoder is called first, and the model with its outputs. So the model's mask of sources is left for the one thing
that it then has to say: which sources a target attends to, those of its own row.

The model's own rule shifts labels row by row where decoder_input_ids are left out. Labels go in as a column: losses
flatten them, and Whisper compares dim 1 with its longest target.

Invariants: all sources share one structure, all targets another, of as many rows.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import KeyPathError, StructureError, UnsupportedError, message
from tdc.hf.attention import CROSS, OP, Packed, require_set
from tdc.hf.inputs import (
    ASKED,
    IGNORED,
    check_options,
    check_rows,
    flat_offsets,
    named,
    parameters_of,
    ragged_of,
    refuse_dense,
)
from tdc.hf.outputs import nest_sides
from tdc.hf.positions import Side, counted
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import longest
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.nested import NestedTensor

SOURCES = ("input_ids", "inputs_embeds", "position_ids")
TARGETS = ("decoder_input_ids", "decoder_inputs_embeds", "labels", "decoder_position_ids")
FEATURES = "input_features"  # sources that are no tokens, all of one length
NEUTRAL = ("use_cache", "return_dict")  # arguments that say nothing of the batch


class EncoderDecoder(NamedTuple):
    """The arguments of a model of encoder and decoder.

    Args:
        names: those of its forward, in order.
        below: those of its encoder.
    """

    names: tuple[str, ...]
    below: tuple[str, ...]


def is_encoder_decoder(model: Any) -> bool:
    """True if a model takes sources and targets."""
    return model.config.is_encoder_decoder and "decoder_input_ids" in parameters_of(model)


def encoder_decoder_forward(parts: EncoderDecoder, inner: Any) -> Any:
    """The forward of a model of encoder and decoder, which takes and gives ragged batches."""

    @wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = named(args, kwargs, parts.names)
        ragged = ragged_of(given)
        if not ragged:
            refuse_flat(given)
            return inner(self, *args, **kwargs)
        require_set(self)
        check_sides(self, parts, given, ragged)
        asked = given.pop(ASKED, None)
        encoded, sources = encode(self, parts, given, asked)
        targets = side_of(given, TARGETS)
        arguments = target_arguments(self, parts, given, targets)
        arguments["encoder_outputs"] = encoded
        arguments["decoder_attention_mask"] = packed(targets, targets, asked)
        arguments[CROSS if FEATURES in given else "attention_mask"] = packed(targets, sources, asked)
        with counted(targets, "decoder_position_ids" in arguments):
            output = inner(self, **arguments)
        return nest_sides(output, None if FEATURES in given else sources.rows, targets.rows)

    return forward


def encode(model: Any, parts: EncoderDecoder, given: dict[str, Any], asked: Any) -> tuple[Any, Side]:
    """Encode the sources, packed if they are ragged."""
    encoder = model.get_encoder()
    passed = {name: x for name, x in given.items() if name not in parts.names}
    if FEATURES in given:
        encoded = encoder(given[FEATURES], **passed)
        return encoded, side_of_one_length(encoded.last_hidden_state)
    side = side_of(given, SOURCES)
    arguments = {name: given[name].values[None] for name in SOURCES if name in given}
    if "position_ids" in parts.below:
        arguments.setdefault("position_ids", side.positions[None])
    with counted(side, False):
        return encoder(attention_mask=packed(side, side, asked), **arguments, **passed), side


def target_arguments(model: Any, parts: EncoderDecoder, given: dict[str, Any], side: Side) -> dict[str, Any]:
    """The arguments of the model but for what the encoder has read."""
    out = {name: x for name, x in given.items() if name not in (*SOURCES, FEATURES)}
    out |= {name: given[name].values[None] for name in TARGETS if name in given}
    if "labels" in given:
        out["labels"] = given["labels"].values[:, None]
        if "decoder_input_ids" not in given and "decoder_inputs_embeds" not in given:
            out["decoder_input_ids"] = shifted(model, given["labels"].values, side)[None]
    if "decoder_position_ids" in parts.names:
        out.setdefault("decoder_position_ids", side.positions[None])
    return out | {"use_cache": False}


def shifted(model: Any, labels: Tensor, side: Side) -> Tensor:
    """Inputs of the decoder for labels (M,): those before, and the first token of the model where a row starts."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        padded = pad_rows(labels, side.rows, longest(side.rows), IGNORED)
        return pack_rows(model.prepare_decoder_input_ids_from_labels(padded), side.rows, side.total)
    before = labels.roll(1).masked_fill(side.positions == 0, model.config.decoder_start_token_id)
    return before.masked_fill(before == IGNORED, model.config.pad_token_id)


def packed(queries: Side, keys: Side, asked: Any) -> Packed:
    """Queries that attend to keys of their own row."""
    return Packed(queries.rows, keys.rows, (queries.total, keys.total), asked=asked)


def side_of(given: dict[str, Any], names: tuple[str, ...]) -> Side:
    """The rows of the first of some arguments that is there."""
    x: NestedTensor = next(given[name] for name in names if name in given)
    return Side(x.structure, x.values.shape[0])


def side_of_one_length(x: Tensor) -> Side:
    """Rows that are all as long, (B, L, D)."""
    count, length = x.shape[:2]
    offsets = torch.arange(count + 1, device=x.device) * length
    return Side(Structure(offsets, None, extent_of((length,), x.device)), count * length)


def check_sides(model: Any, parts: EncoderDecoder, given: dict[str, Any], ragged: dict[str, NestedTensor]) -> None:
    """An error that says what does not fit; sources and targets are there otherwise, as many of each."""
    check_options(given)
    known = [name for name in (*SOURCES, *TARGETS) if name in parts.names]
    of_model = {name for name in parts.names if name not in (FEATURES, *NEUTRAL)}
    other = [name for name in given if name not in known and (name in ragged or name in of_model)]
    if other:
        hint = "features of one length" if FEATURES in other else "td.exclude(name) for what the model does not take"
        raise KeyPathError(message(OP, f"{', '.join(known)} of rows", ", ".join(other), hint=hint))
    if FEATURES in given:
        expect(OP, given[FEATURES], Tensor, of=" of features (B, F, T)")
    count = given[FEATURES].shape[0] if FEATURES in given else check_side(given, SOURCES, known)
    targets = check_side(given, TARGETS, known)
    if count != targets:
        hint = "one target for each source"
        raise StructureError(message(OP, "as many targets as sources", f"{targets} for {count}", hint=hint))
    if FEATURES in given and model.training and getattr(model.config, "apply_spec_augment", False):
        hint = "model.config.apply_spec_augment = False, and mask the features in the data loader"
        raise UnsupportedError(message(OP, "features that the model leaves as they are", "SpecAugment", hint=hint))


def refuse_flat(given: dict[str, Any]) -> None:
    """An UnsupportedError for transformers' packed form, which has no sources and targets."""
    if flat_offsets(given) is not None:
        got, hint = "rows packed by DataCollatorWithFlattening", "NestedTensors of sources and of targets"
        raise UnsupportedError(message(OP, "sources and targets", got, hint=hint))


def check_side(given: dict[str, Any], names: tuple[str, ...], known: list[str]) -> int:
    """Number of rows of the sources or the targets, which have tokens and one structure."""
    refuse_dense(given, names)
    tokens = {name: given[name] for name in names if name in given}
    first = next((x for name, x in tokens.items() if not name.endswith("position_ids")), None)
    if first is None:
        expected = [name for name in names if name in known and not name.endswith("position_ids")]
        text = f"{' or '.join(expected)} as a NestedTensor" if expected else f"{FEATURES} (B, F, T)"
        raise KeyPathError(message(OP, text, "no such argument", hint="a source and a target of each example"))
    check_rows(tokens, first)
    return first.structure.batch_size  # type: ignore[no-any-return]  # untyped
