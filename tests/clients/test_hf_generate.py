"""Ragged prompts for transformers' `generate`: each row has the tokens that its prompt has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc

transformers: Any = pytest.importorskip("transformers")

from hf_encoder_decoder import build_encoder_decoder  # noqa: E402 - behind the skip
from hf_models import build, tokens  # noqa: E402 - behind the skip

from tdc.hf import attend, generate  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
CAUSAL = [("GPT2", "LMHeadModel"), *[(n, "ForCausalLM") for n in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2")]]


@pytest.mark.parametrize(("family", "head"), CAUSAL)
@pytest.mark.parametrize("attended", [False, True])
def test_tokens_are_those_of_each_prompt_alone(family: str, head: str, attended: bool):
    model, x = build(family, head), tokens((7, 1, 12, 3))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [2, *range(10, 14)]}
    expected = [model.generate(row[None], attention_mask=torch.ones(1, len(row)), **options)[0] for row in x]
    new = generate(attend(model) if attended else model, x, **options)
    assert new.tolist() == [found[len(row) :].tolist() for found, row in zip(expected, x, strict=True)]
    assert torch.cat([x, new], 1).tolist() == [found.tolist() for found in expected]


def test_several_of_each_prompt():
    model, x = build("Llama", "ForCausalLM"), tokens((3, 5))
    new = generate(model, x, max_new_tokens=4, do_sample=True, num_return_sequences=3, eos_token_id=None)
    assert new.lengths.tolist() == [4] * 6


@pytest.mark.parametrize(
    ("prompts", "options", "text"),
    [
        ([[1, 2]], {}, "expected a NestedTensor of prompts, got list"),
        (torch.ones(2, 3), {}, "expected a NestedTensor of prompts, got Tensor"),
        (tdc.pack([torch.ones(2)]), {}, "expected prompts (B, -1) of whole numbers"),
        (tdc.from_list([[1], []]), {}, "expected prompts with tokens, got an empty one"),
        (tdc.from_list([[1]]), {"attention_mask": torch.ones(1, 1)}, "the prompts have lengths"),
        (tdc.from_list([[1]]), {"decoder_input_ids": torch.ones(1, 1)}, "decoder_start_token_id=..."),
        (tdc.from_list([[1]]), {"return_dict_in_generate": True}, "side='left'"),
    ],
)
def test_what_is_refused(prompts: Any, options: dict[str, Any], text: str):
    with pytest.raises(tdc.TdcError) as error:
        generate(build("Llama", "ForCausalLM"), prompts, **options)
    assert text in str(error.value)


def test_models_that_do_not_generate():
    with pytest.raises(tdc.UnsupportedError, match="a model that generates, got BertModel"):
        generate(build("Bert", "Model"), tokens())
    with pytest.raises(tdc.UnsupportedError, match=r"from tokens, got Whisper.*, of input_features"):
        generate(build_encoder_decoder("Whisper"), tokens())
    with pytest.raises(tdc.DtypeError, match=r"tdc\.hf\.generate: expected a model of transformers, got int"):
        generate(3, tokens())
