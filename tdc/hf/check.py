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
from torch import Tensor, nn

from tdc.core.errors import UnsupportedError, first_line, message
from tdc.hf.attention import OP, PADDED, Asked, Rule
from tdc.hf.encoder_decoder import FEATURES, is_encoder_decoder
from tdc.hf.inputs import ASKED, parameters_of
from tdc.hf.positions import contexts_of
from tdc.ragged.nested import NestedTensor
from tdc.ragged.pack import pack

LENGTHS = (9, 1, 4)
OF_TARGETS = (3, 7, 2)
DISTANT = (0, 1, 2, 3, 7, 8, 100, 127, 128, 129, 1000, 4095, 4096, 8191, 8192, 65536, 2**20)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number
LONGEST = 4096  # tokens of a row beyond a context that the check runs


def trials(model: Any) -> list[list[dict[str, Tensor]]]:
    """The arguments of a few short rows, each by itself, and of some on both sides of each context of the model."""
    beyond = [] if is_encoder_decoder(model) else sorted({n for n in contexts_of(model) if n <= LONGEST})
    return [trial(model), *[[{"input_ids": row} for row in rows_of_tokens(model, (n + 1, 2))] for n in beyond]]


def trial(model: Any) -> list[dict[str, Tensor]]:
    """The arguments of a few short rows, each by itself."""
    if not is_encoder_decoder(model):
        return [{"input_ids": row} for row in rows_of_tokens(model, short(model, LENGTHS))]
    names = parameters_of(model)
    source = FEATURES if FEATURES in names else "input_ids"
    target = "labels" if "labels" in names else "decoder_input_ids"
    sources = rows_of_features(model) if source == FEATURES else rows_of_tokens(model, short(model, LENGTHS))
    targets = rows_of_tokens(model, short(model, OF_TARGETS))
    return [{source: x, target: y} for x, y in zip(sources, targets, strict=True)]


def short(model: Any, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths for which the model has positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(lengths)
    return tuple([max(1, min(n, most - 2)) for n in lengths])


def rows_of_tokens(model: Any, lengths: tuple[int, ...]) -> list[Tensor]:
    """A few rows of tokens, none of them special."""
    table = model.get_input_embeddings()
    count, config = table.weight.shape[0], model.config.get_text_config()
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    found = [getattr(config, name, None) for name in names]  # some have a list of them
    special = {i for x in found for i in (x if isinstance(x, list) else [x])}
    plain = [i for i in range(count) if i not in special] or [0]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = [[plain[(7 * (b + i) + 3) % len(plain)] for i in range(n)] for b, n in zip(begins, lengths, strict=True)]
    return [torch.tensor(row, device=table.weight.device) for row in ids]


def rows_of_features(model: Any) -> list[Tensor]:
    """A few rows of features of sound (F, T), as long as Whisper asks for."""
    config = model.config
    length = getattr(config, "max_source_positions", None)
    if length is None or not hasattr(config, "num_mel_bins"):
        got, hint = f"{type(model).__name__}, whose features have another form", PADDED
        raise UnsupportedError(message(OP, "features (num_mel_bins, 2 * max_source_positions)", got, hint=hint))
    weight = next(model.parameters())
    points = torch.arange(2 * length * config.num_mel_bins, device=weight.device).view(config.num_mel_bins, -1)
    return [torch.sin(points * (i + 1)).to(weight.dtype) for i in range(len(OF_TARGETS))]


def batched(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The rows as one batch: tokens packed, features stacked."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: torch.stack(x) if name == FEATURES else pack(x) for name, x in columns.items()}


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


def alone(model: Any) -> list[list[dict[str, Tensor]]]:
    """The outputs for each row of each trial by itself, under the attention that the model has."""
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with at_rest(model):
        try:
            return [
                [tensors(model(**{name: x[None] for name, x in row.items()}, **options)) for row in rows]
                for rows in trials(model)
            ]
        except UnsupportedError:
            raise
        except Exception as error:
            got = f"{type(model).__name__}, which fails: {first_line(error)}"
            hint = "a configuration with which one row runs"
            raise UnsupportedError(message(OP, "a model of tokens", got, hint=hint)) from error


def tensors(output: Any) -> dict[str, Tensor]:
    """The outputs that are tensors, of the first and only row."""
    return {name: x[0] for name, x in output.items() if isinstance(x, Tensor) and x.ndim}


def check_packed(model: Any, expected: list[list[dict[str, Tensor]]]) -> None:
    """An UnsupportedError where packed rows are not what they are alone, in any trial."""
    for rows, outputs in zip(trials(model), expected, strict=True):
        check_trial(model, rows, outputs)


def check_trial(model: Any, rows: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """An UnsupportedError where packed rows are not what they are alone."""
    asked: list[Asked] = []
    name = type(model).__name__
    with at_rest(model):
        try:
            output = model(**batched(rows), **{ASKED: asked})
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
        found = list(output[key]) if isinstance(output[key], NestedTensor) else output[key].unbind()
        off = max([distance(x, one[key]) for x, one in zip(found, expected, strict=False)])
        if len(found) != len(expected):
            wrong[key] = f"{len(found)} results for {len(expected)} rows"
        elif not off <= CLOSE.get(found[0].dtype, 1e-4):
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
    layers, name = count_layers(model), type(model).__name__
    modules = {id(a.module) for a in asked}
    if len(modules) < layers:
        got, hint = f"{name}, {len(modules)} of {layers} layers", PADDED
        raise UnsupportedError(message(OP, "a model all of whose layers attend", got, hint=hint))
    for a in asked:
        if a.rule is not None and not agrees(a.rule, a.causal, a.window):
            what = f"causal={a.causal}, window={a.window}"
            got, hint = f"{type(a.module).__name__}, whose mask is another than {what}", PADDED
            raise UnsupportedError(message(OP, "attention that is causal, in a window, or full", got, hint=hint))


def count_layers(model: Any) -> int:
    """Number of times that a model attends: once in each layer, in those of a decoder of sources twice."""
    if not is_encoder_decoder(model):
        return model.config.get_text_config().num_hidden_layers  # type: ignore[no-any-return]  # untyped
    own = 0 if FEATURES in parameters_of(model) else 1
    return own * depth(model.get_encoder()) + 2 * depth(model.get_decoder())


def depth(part: Any) -> int:
    """Number of layers of an encoder or a decoder: as its longest list of modules."""
    return max([len(m) for m in part.children() if isinstance(m, nn.ModuleList)], default=0)


def agrees(rule: Rule, causal: bool, window: int | None) -> bool:
    """True if a mask function of transformers allows the pairs that we attend to, up to the width of a window."""
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
