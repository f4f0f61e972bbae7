"""Small models of transformers, built from configurations, and what each says of one row alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tdc

WORDS = 50
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "classifier_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {**SIZES, **NO_DROPOUT},
    "Roberta": {**SIZES, **NO_DROPOUT, "pad_token_id": 1, "bos_token_id": 0},
    "ModernBert": {
        **SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "GPT2": {
        "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Llama": DECODER,
    "Qwen2": {**DECODER, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {**DECODER, "head_dim": 4},
    "Mistral": {**DECODER, "sliding_window": 4},
    "Gemma2": {**DECODER, "sliding_window": 4, "head_dim": 4},
}  # fmt: skip
OF_TOKENS = ("Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")
CASES = [
    (family, head)
    for family in FAMILIES
    for head in (*OF_TOKENS, *OF_ROWS, "ForPreTraining")
    if hasattr(transformers, family + head) and (family, head) != ("Bert", "ForCausalLM")
]
LOSSES = [c for c in CASES if c[1] not in ("Model", "ForQuestionAnswering", "ForPreTraining")]
LENGTHS = (7, 1, 12, 3)


def build(family: str, head: str, seed: int = 0, **options: Any) -> Any:
    """A model with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **options})
    config.problem_type = "single_label_classification"
    return with_large_weights(getattr(transformers, family + head)(config))


def with_large_weights(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model.eval()


def twin(model: Any) -> Any:
    """The same weights with the attention that transformers spells out."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def tokens(lengths: tuple[int, ...] = LENGTHS, least: int = 3) -> tdc.NestedTensor:
    return tdc.pack([torch.randint(least, WORDS, (n,)) for n in lengths])


def labels_for(head: str, x: tdc.NestedTensor) -> Any:
    """Labels of each row or of each token, of which some are left out."""
    if head in OF_ROWS:
        return torch.arange(len(x)) % 2
    classes = 2 if head == "ForTokenClassification" else WORDS
    labels = torch.randint(0, classes, x.values.shape)
    return x.with_values(labels.masked_fill(torch.rand(labels.shape) < 0.3, -100))


def loss_alone(model: Any, head: str, x: tdc.NestedTensor, labels: Any) -> Tensor:
    """The loss of the batch from those of its rows, each weighed by the labels that count."""
    total, count = torch.zeros(()), 0
    for row, own in zip(x, labels, strict=True):
        counted = 1
        if head not in OF_ROWS:
            counts = own[1:] if head in ("ForCausalLM", "LMHeadModel") else own
            counted = int((counts != -100).sum())
        if counted:
            total = total + model(input_ids=row[None], labels=own[None]).loss * counted
            count += counted
    return total / count


ERROR = re.compile(r"tdc\.[\w.]+: expected .*, got .*(\nat .*)*\nhint: .+", re.DOTALL)


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(tdc.TdcError) as error:
        call()
    assert ERROR.fullmatch(str(error.value)), str(error.value)
    assert text in str(error.value), str(error.value)
