"""What `tdc.hf.attend` refuses, in words: arguments a newcomer would type, and models that would see other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tdc

transformers: Any = pytest.importorskip("transformers")

from hf_models import DECODER, SIZES, build, refused, tokens, twin  # noqa: E402 - behind the skip
from torch.testing import assert_close  # noqa: E402 - behind the skip

from tdc.hf import attend  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
X = tdc.pack([torch.tensor([5, 6, 7]), torch.tensor([8])])
OTHER = tdc.pack([torch.tensor([5]), torch.tensor([8, 9, 10])])
PADDED = X.to_padded()
ARGUMENTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a mask beside rows": ("Bert", "Model", {"attention_mask": torch.ones(2, 3)}, "the rows have lengths"),
    "a padded entry": ("Bert", "Model", {"token_type_ids": torch.zeros(2, 3).long()}, "at token_type_ids: Tensor"),
    "padded labels": ("Llama", "ForCausalLM", {"labels": torch.zeros(2, 3).long()}, "at labels: Tensor int64[2, 3]"),
    "labels of other rows": ("Llama", "ForCausalLM", {"labels": OTHER}, "labels of the structure of the tokens"),
    "labels of tokens": ("Bert", "ForSequenceClassification", {"labels": X}, "expected labels of rows"),
    "tokens of other rows": ("Bert", "Model", {"token_type_ids": OTHER}, "rows of different lengths"),
    "a MaskedBatch": ("Bert", "Model", {"input_ids": PADDED}, "x.to_packed()"),
    "3-d tokens": ("Bert", "Model", {"input_ids": X.with_values(torch.ones(4, 2).long())}, "input_ids (B, -1)"),
    "vectors of 2 dims": (
        "Bert", "Model", {"input_ids": None, "inputs_embeds": X.with_values(torch.ones(4))}, "inputs_embeds (B, -1, D)"
    ),
    "tokens that are no numbers": ("Bert", "Model", {"input_ids": X.with_values(torch.ones(4))}, "inputs_embeds=x"),
    "no tokens": ("Bert", "Model", {"input_ids": None, "position_ids": X}, "input_ids or inputs_embeds"),
    "a cache": ("Llama", "ForCausalLM", {"use_cache": True}, "to_hf(batch, side='left')"),
    "weights": ("Bert", "Model", {"output_attentions": True}, "output_attentions"),
    "a tuple": ("Bert", "Model", {"return_dict": False}, "output.to_tuple()"),
    "loads of experts": (
        "Llama", "ForCausalLM", {"output_router_logits": True}, "the load of experts is that of the whole batch",
    ),
    "some logits": ("Llama", "ForCausalLM", {"logits_to_keep": 1}, "take the logits that you want"),
    "a span": (
        "Bert", "ForQuestionAnswering", {"start_positions": torch.zeros(2).long()},
        "it would count padding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str):
    family, head, arguments, text = ARGUMENTS[case]
    model = attend(build(family, head))
    refused(lambda: model(**{"input_ids": X, **arguments}), text)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_an_empty_row_has_no_first_token(head: str):
    model = attend(build("Bert", head))
    refused(lambda: model(input_ids=tokens((2, 0, 3))), "an empty row")


@pytest.mark.parametrize("x", [[1], {"a": 1}, None, torch.zeros(3), np.zeros(3), "bert", 3, object(), nn.Linear(1, 1)])
def test_no_model_of_transformers(x: Any):
    refused(lambda: attend(x), "expected a model of transformers")


def test_a_model_that_is_wrapped():
    hint = "tdc.hf.attend(model) first, then compile or wrap it"
    refused(lambda: attend(torch.compile(build("Bert", "Model"), backend="eager")), hint)
    refused(lambda: attend(nn.Sequential(build("Bert", "Model"))), hint)


# Models that look beyond rows elsewhere than in attention, or whose attention is another.


def configured(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"n_layer": 2, "n_head": 4}, ""),
    "Mpt": ({"d_model": 16, "n_layers": 2, "n_heads": 4}, ""),
    "Mamba": ({"state_size": 4}, ""),
    "RecurrentGemma": ({**DECODER, "lru_width": 16, "head_dim": 4, "num_hidden_layers": 3}, ""),
    "DebertaV2": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, ""),
    "ConvBert": ({"embedding_size": 16, "num_groups": 1, "head_ratio": 2}, ""),
    "FNet": ({}, ""),
    "GptOss": (
        {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": 2 * ["full_attention"]},
        "attention sinks",
    ),
    "Jamba": ({**DECODER, "mamba_d_state": 4, "num_experts": 1, "use_mamba_kernels": False}, ""),
    "Lfm2": ({**DECODER, "layer_types": ["conv", "full_attention"]}, ""),
    "Falcon": ({"alibi": True}, ""),
    "Longformer": ({"attention_window": 4}, ""),
    "BigBird": ({}, ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_see_other_rows(name: str):
    options, text = MODELS[name]
    model = configured(name, **options)
    before = model.config._attn_implementation
    refused(lambda: attend(model), text)
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_outputs_of_the_whole_batch(name: str):
    config = transformers.MixtralConfig(**DECODER, num_local_experts=2)
    setattr(config, name, True)
    refused(lambda: attend(transformers.MixtralForCausalLM(config)), f"model.config.{name} = False")


def test_a_configuration_without_padding():
    """CodeGen's has no pad_token_id."""
    config = transformers.CodeGenConfig(
        vocab_size=50, n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    attend(transformers.CodeGenForCausalLM(config))


def test_a_layer_that_looks_at_its_neighbour():
    model = build("Bert", "Model")
    model.encoder.layer[0].register_forward_hook(lambda layer, args, out: out + out.roll(1, 1))
    refused(lambda: attend(model), "BertModel, which sees other rows\nat last_hidden_state: off by ")


def test_a_layer_that_attends_to_more_than_its_mask():
    model = build("Llama", "Model")
    model.layers[1].self_attn.is_causal = False
    refused(lambda: attend(model), "LlamaAttention, whose mask is another than causal=False, window=None")


def test_chunks_longer_than_the_rows_of_the_check():
    refused(lambda: attend(build_chunked(8192)), "")


def build_chunked(size: int) -> Any:
    config = transformers.Llama4TextConfig(
        **DECODER, head_dim=4, attention_chunk_size=size, num_local_experts=1, no_rope_layers=[1, 1],
        layer_types=["chunked_attention", "full_attention"], intermediate_size_mlp=32, moe_layers=[],
    )  # fmt: skip
    return transformers.Llama4TextModel(config).eval()


def test_a_model_that_is_refused_is_as_it_was():
    model, x = build("Bert", "Model"), torch.tensor([[5, 6, 7]])
    expected = twin(model)(x).last_hidden_state
    hook = model.encoder.layer[0].register_forward_hook(lambda layer, args, out: out + out.roll(1, 1))
    refused(lambda: attend(model), "sees other rows")
    hook.remove()
    assert_close(model(x).last_hidden_state, expected)
    assert not model.training
    assert "forward" not in vars(model)
