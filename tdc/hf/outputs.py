"""Outputs of a model for a packed batch, as ragged batches.

    last_hidden_state, logits, hidden_states   (1, N, ...)   ->  NestedTensor (B, -1, ...)
    pooler_output, logits of rows              (B, ...)          as they are
    loss                                       ()                as it is

Invariant: an output that is in none of the tables is refused, since nothing says whether it crosses rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, UnsupportedError, message
from tdc.hf.attention import OP, Packed
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import lengths_of, longest
from tdc.layout.structure import Structure
from tdc.ragged.nested import NestedTensor, build_nested

TOKENS = ("last_hidden_state", "hidden_states", "logits", "prediction_logits")  # (1, N, ...)
STATES = ("last_hidden_state", "hidden_states", "start_logits", "end_logits")  # (B, L, ...) of a head of rows
ROWS = ("pooler_output", "seq_relationship_logits", "loss")  # as they are
UNCHANGED = ("logits", *ROWS)  # of a head of rows
OF_TARGETS = ("last_hidden_state", "logits", "decoder_hidden_states")  # (1, M, ...) of encoder and decoder
OF_SOURCES = ("encoder_last_hidden_state", "encoder_hidden_states")  # (1, N, ...)


def nest_output(output: Any, packed: Packed) -> Any:
    """The outputs of a model as the batch that it was called with."""
    of_rows = packed.inputs is not None
    ragged, other = (STATES, UNCHANGED) if of_rows else (TOKENS, ROWS)
    require_known(output, (*ragged, *other))
    for name in [name for name in output if name in ragged]:
        output[name] = each(output[name], lambda x: nested(x, packed, of_rows))
    return output


def nest_sides(output: Any, sources: Structure | None, targets: Structure) -> Any:
    """The outputs of a model of encoder and decoder as the batches that it was called with; dense sources stay so."""
    require_known(output, (*OF_TARGETS, *OF_SOURCES, "loss"))
    for names, rows in ((OF_TARGETS, targets), (OF_SOURCES, sources)):
        if rows is not None:
            for name in [name for name in output if name in names]:
                output[name] = each(output[name], partial(rows_of, rows))
    return output


def require_known(output: Any, known: tuple[str, ...]) -> None:
    """An UnsupportedError for an output of which nothing says whether it crosses rows."""
    for name in output:
        if name not in known:
            hint = "ask for none that crosses rows"
            raise UnsupportedError(message(OP, f"an output among {', '.join(known)}", name, hint=hint))


def settle_output(output: Any, packed: Packed, pooler: Any) -> Any:
    """The outputs of a model without its head: what its pooler makes of each row, and padded for a head of rows."""
    if pooler is not None and "pooler_output" in output:
        output["pooler_output"] = pooler(first_tokens(output["last_hidden_state"], packed))
    if packed.inputs is not None:
        shape = longest(packed.keys)
        for name in ("last_hidden_state", "hidden_states"):
            if name in output:
                output[name] = each(output[name], lambda x: pad_rows(x[0], packed.keys, shape))
    return output


def first_tokens(x: Tensor, packed: Packed) -> Tensor:
    """The first token of each row, (1, N, D) -> (B, 1, D), which poolers take at position 0."""
    text = message(OP, "rows with tokens", "an empty row", hint="leave empty rows out: a pooler takes the first token")
    require((lengths_of(packed.keys) > 0).all(), text, ShapeError)
    return x[0].index_select(0, packed.keys.offsets[:-1])[:, None]


def nested(x: Tensor, packed: Packed, of_rows: bool) -> NestedTensor:
    """Positions (1, N, ...), or padded (B, L, ...), as rows."""
    if of_rows:
        return build_nested(packed.keys, pack_rows(x, packed.keys, packed.totals[1]))
    return rows_of(packed.keys, x)


def rows_of(rows: Structure, x: Tensor) -> NestedTensor:
    """Positions (1, N, ...) as rows."""
    return build_nested(rows, x[0])


def each(x: Any, fn: Any) -> Any:
    """A function of a tensor, or of each of a tuple of tensors; None for one that was not asked for."""
    return tuple([None if t is None else fn(t) for t in x]) if isinstance(x, tuple) else fn(x)
