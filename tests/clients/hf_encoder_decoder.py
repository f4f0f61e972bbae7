"""Small models of encoder and decoder, built from configurations, and what each says of one source and its target.

A batch has more positions than tables of positions have entries.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from hf_models import LENGTHS, WORDS, tokens, with_large_weights
from torch import Tensor

BART: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
FRAMES, MELS = 20, 8
WHISPER = {**BART, "max_source_positions": FRAMES // 2, "max_target_positions": 16, "num_mel_bins": MELS}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Bart", "MBart", "Pegasus", "Marian", "M2M100"), BART),
    **dict.fromkeys(("T5", "UMT5"), T5),
    "Whisper": {name: x for name, x in WHISPER.items() if name != "max_position_embeddings"},
}
TARGETS = (2, 6, 4, 9)
CONDITIONAL = "ForConditionalGeneration"


def build_encoder_decoder(family: str, head: str = CONDITIONAL, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **options})
    if (family, head) == ("Marian", CONDITIONAL):
        head = "MTModel"
    return with_large_weights(getattr(transformers, family + head)(config))


def sources_of(family: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    if family == "Whisper":
        return {"input_features": torch.randn(len(lengths), MELS, FRAMES)}
    return {"input_ids": tokens(lengths)}


def batch_of(family: str, sources: tuple[int, ...] = LENGTHS, targets: tuple[int, ...] = TARGETS) -> dict[str, Any]:
    """Sources, and labels of which some are left out."""
    y = tokens(targets)
    left_out = torch.rand(y.values.shape) < 0.3
    return {**sources_of(family, sources), "labels": y.with_values(y.values.masked_fill(left_out, -100))}


def rows_of(batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Each row of a batch as a batch of one."""
    return [{name: x[i][None] for name, x in batch.items()} for i in range(len(next(iter(batch.values()))))]


def loss_of_rows(model: Any, batch: dict[str, Any]) -> Tensor:
    """The mean over all labels that count, from the losses of the rows."""
    counted = [(row, int((row["labels"] != -100).sum())) for row in rows_of(batch)]
    losses = [model(**row).loss * count for row, count in counted if count]
    return torch.stack(losses).sum() / sum([count for _, count in counted])
