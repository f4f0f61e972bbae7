"""Ragged prompts for the `generate` of transformers.

Its caches are rectangles, so prompts are padded on the left, where no new token comes between a prompt and its padding;
transformers takes positions from the mask. Sources of an encoder are padded on the right: new tokens are in no row with
them, and encoders count positions from the left. What comes back is cut where each row ends.

Invariant: with greedy decoding each row has the tokens that it has alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.asserts import require
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.hf.model import expect_model
from tdc.interop.huggingface import to_hf
from tdc.layout.segments import lengths_of
from tdc.ragged.convert import from_padded
from tdc.ragged.nested import NestedTensor

OP = "hf.generate"
REFUSED = {  # options that are made of the prompts, or that change what comes back
    "input_ids": "the prompts are the second argument",
    "inputs": "the prompts are the second argument",
    "inputs_embeds": "prompts of tokens, or model.generate with padding on the left",
    "attention_mask": "leave it out: the prompts have lengths",
    "position_ids": "leave it out: transformers takes positions from the mask",
    "decoder_input_ids": "decoder_start_token_id=..., or model.generate with sources padded on the right",
    "decoder_attention_mask": "leave it out: targets begin with decoder_start_token_id",
    "encoder_outputs": "leave it out: the encoder is called with the sources",
    "return_dict_in_generate": "model.generate(**tdc.interop.to_hf(prompts, side='left'), ...)",
}


def generate(model: Any, prompts: NestedTensor, **options: Any) -> NestedTensor:
    """The new tokens for each prompt, or each source of an encoder, up to and including the first end of sequence.

    Shapes:
        prompts `(B, -1)` -> `(B, -1)`; `(B * n, -1)` with `num_return_sequences=n`.

    Args:
        model: a model of transformers with a causal head, or of encoder and decoder, attended or not.
        prompts: whole numbers, one or more in each row; sources of a model of encoder and decoder.
        options: those of `model.generate`, such as `max_new_tokens`, `do_sample`, `num_beams`.

    Raises:
        DtypeError: no such model, or no NestedTensor of whole numbers.
        ShapeError: a prompt without tokens.
        UnsupportedError: a model that cannot generate, or not from tokens, or options that prompts stand for.

    Compile:
        Eager only: the loop of transformers.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0))
        >>> from tdc.ragged.pack import from_list
        >>> generate(model, from_list([[5, 6], [7, 8, 9]]), max_new_tokens=4, do_sample=False).lengths
        tensor([4, 4])
    """
    check_call(model, prompts, options)
    config = model.generation_config
    ends = options.get("eos_token_id", config.eos_token_id)
    pad = options.get("pad_token_id", config.pad_token_id)
    of_sources = model.config.is_encoder_decoder
    padded = to_hf(prompts, side="right" if of_sources else "left", pad=0 if pad is None else pad)
    found: Tensor = model.generate(padded["input_ids"], attention_mask=padded["attention_mask"], **options)
    new = found[:, 1 if of_sources else padded["input_ids"].shape[1] :]  # targets begin with one token that is not new
    return from_padded(new, lengths=lengths_until(new, ends)).to_packed()


def check_call(model: Any, prompts: Any, options: dict[str, Any]) -> None:
    """A model that generates, and prompts that say all that it is to know."""
    expect_model(model, OP)
    expect(OP, prompts, NestedTensor, of=" of prompts")
    if not model.can_generate():
        got, hint = type(model).__name__, "a model ...ForCausalLM or ...ForConditionalGeneration"
        raise UnsupportedError(message(OP, "a model that generates", got, hint=hint))
    if model.main_input_name != "input_ids":
        got, hint = f"{type(model).__name__}, of {model.main_input_name}", "model.generate(...): they have one length"
        raise UnsupportedError(message(OP, "a model that generates from tokens", got, hint=hint))
    if prompts.ndim != 2 or prompts.ragged_dims != (1,) or prompts.dtype.is_floating_point or prompts.dtype.is_complex:
        hint = "tdc.from_list([[1, 2], [3]]), or from_hf(encoding)['input_ids']"
        raise DtypeError(message(OP, "prompts (B, -1) of whole numbers", describe(prompts), hint=hint))
    for name, hint in REFUSED.items():
        if options.get(name) is not None:
            raise UnsupportedError(message(OP, f"options without {name}", describe(options[name]), hint=hint))
    text = message(OP, "prompts with tokens", "an empty one", hint="begin each with the token of the beginning")
    require((lengths_of(prompts.structure) > 0).all(), text, ShapeError)


def lengths_until(tokens: Tensor, ends: Any) -> Tensor:
    """How many tokens (B, L) there are up to the first that ends a row."""
    width = tokens.shape[1]
    if ends is None or not width:
        return torch.full(tokens.shape[:1], width, device=tokens.device)
    known = torch.as_tensor(ends, device=tokens.device).flatten()
    last = torch.isin(tokens, known)
    return torch.where(last.any(1), last.int().argmax(1) + 1, width)
