"""Does a model see each row alone? Asked by running it, before anybody trusts it.

A few short rows go through the model one by one, as it was, and packed. Every number must agree. Besides, each layer of
attention must have been asked, and must attend to what transformers' mask function says, also far beyond short rows.

Invariants: nothing of the model changes, nor the state of random numbers; no gradient is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import UnsupportedError, first_line, message
from tdc.hf.attention import PADDED
from tdc.hf.inputs import ASKED
from tdc.hf.packed import OP, Asked, Rule
from tdc.ragged.nested import NestedTensor
from tdc.ragged.pack import pack

LENGTHS = (9, 1, 4)
DISTANT = (0, 1, 2, 3, 7, 8, 100, 127, 128, 129, 1000, 4095, 4096, 8191, 8192, 65536, 2**20)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number


def rows_of_tokens(model: Any) -> list[Tensor]:
    """A few rows of tokens, none of them special."""
    table = model.get_input_embeddings()
    count, config = table.weight.shape[0], model.config.get_text_config()
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    special = {getattr(config, name, None) for name in names}
    plain = [i for i in range(count) if i not in special] or [0]
    most = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
    lengths = [max(1, min(n, most - 2)) for n in LENGTHS]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = [[plain[(7 * (b + i) + 3) % len(plain)] for i in range(n)] for b, n in zip(begins, lengths, strict=True)]
    return [torch.tensor(row, device=table.weight.device) for row in ids]


@contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """The model in evaluation, without gradients; as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


def alone(model: Any) -> list[dict[str, Tensor]]:
    """The outputs for each row by itself, under the attention that the model has."""
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with at_rest(model):
        return [tensors(model(input_ids=row[None], **options)) for row in rows_of_tokens(model)]


def tensors(output: Any) -> dict[str, Tensor]:
    """The outputs that are tensors, of the first and only row."""
    return {name: x[0] for name, x in output.items() if isinstance(x, Tensor) and x.ndim}


def check_packed(model: Any, expected: list[dict[str, Tensor]]) -> None:
    """An UnsupportedError where packed rows are not what they are alone."""
    asked: list[Asked] = []
    name = type(model).__name__
    with at_rest(model):
        try:
            output = model(input_ids=pack(rows_of_tokens(model)), **{ASKED: asked})
        except UnsupportedError:
            raise
        except Exception as error:
            text = first_line(error)
            how = "which computes with its attention mask" if "'Packed'" in text else f"which fails: {text}"
            got, hint = f"{name}, {how}", PADDED
            raise UnsupportedError(message(OP, "a model that takes packed rows", got, hint=hint)) from error
    check_asked(model, asked)
    wrong = {}
    for key in expected[0]:
        rows = list(output[key]) if isinstance(output[key], NestedTensor) else output[key].unbind()
        off = max([distance(row, one[key]) for row, one in zip(rows, expected, strict=False)])
        if len(rows) != len(expected):
            wrong[key] = f"{len(rows)} results for {len(expected)} rows"
        elif not off <= CLOSE.get(rows[0].dtype, 1e-4):
            wrong[key] = f"off by {off:.1e} of the largest number"
    if wrong:
        expected_text, hint = "the outputs of each row alone", PADDED
        raise UnsupportedError(message(OP, expected_text, f"{name}, which sees other rows", wrong, hint))


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    if x.shape != y.shape:
        return float("inf")
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-6))


def check_asked(model: Any, asked: list[Asked]) -> None:
    """Every layer has asked for our attention, by the rule that it has."""
    layers, name = model.config.get_text_config().num_hidden_layers, type(model).__name__
    modules = {id(a.module) for a in asked}
    if len(modules) < layers:
        got, hint = f"{name}, {len(modules)} of {layers} layers", PADDED
        raise UnsupportedError(message(OP, "a model all of whose layers attend", got, hint=hint))
    for a in asked:
        if a.rule is not None and not agrees(a.rule, a.causal, a.window):
            what = f"causal={a.causal}, window={a.window}"
            got, hint = f"{type(a.module).__name__}, whose mask is another than {what}", PADDED
            raise UnsupportedError(message(OP, "attention that is causal, in a window, or full", got, hint=hint))


def agrees(rule: Rule, causal: bool, window: int | None) -> bool:
    """Whether a mask function of transformers allows the pairs that we attend to, as far apart as windows go."""
    points = sorted({*DISTANT, *([] if window is None else range(max(0, window - 2), window + 3))})
    at = torch.tensor(points)
    query, key, zero = at[:, None], at[None, :], torch.zeros((), dtype=torch.int64)
    ours = torch.ones(len(points), len(points), dtype=torch.bool)
    if causal:
        ours &= key <= query
    if window is not None:
        ours &= (query - key).abs() < window
    try:
        theirs = torch.as_tensor(rule(zero, zero, query, key)).expand_as(ours)
    except (IndexError, RuntimeError, TypeError):
        return False  # it reads something of each batch
    return bool((ours == theirs).all())
