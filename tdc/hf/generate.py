"""Ragged prompts for the `generate` of transformers.

Its caches are rectangles, so prompts are padded on the left, where no new token comes between a prompt and its padding;
transformers takes positions from the mask. Sources of an encoder are padded on the right: new tokens are in no row with
them, and encoders count positions from the left. What comes back is cut where each row ends.

Options are in one of four tables: right for any padding, right where the prompts (or the sources) have one length since
they read or count padding, or refused. An option in none of the tables is refused.

Invariant: without random numbers each row has the tokens that it has alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.asserts import require
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.hf.attention import library
from tdc.hf.model import expect_model
from tdc.hf.positions import contexts_of
from tdc.interop.huggingface import to_hf
from tdc.layout.segments import lengths_of
from tdc.ragged.convert import from_padded
from tdc.ragged.nested import NestedTensor

OP = "hf.generate"
EACH = "model.generate(row[None], ...) for each row"
TAKEN = {
    # the number of new tokens, and where rows end
    "max_new_tokens", "min_new_tokens", "early_stopping", "eos_token_id", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "num_return_sequences",
    # search and sampling
    "do_sample", "num_beams", "length_penalty", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff",
    # scores of the next token
    "repetition_penalty", "renormalize_logits", "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens",
    "guidance_scale",
    # memory and speed
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config",
    "disable_compile", "synced_gpus",
    # without effect: no dictionary is returned, no strings are searched, and there is no assistant
    "output_scores", "output_logits", "tokenizer", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type",
    # the configuration itself
    "generation_config", "transformers_version",
}  # fmt: skip
OF_ONE_PROMPT_LENGTH = {  # options that read or count the padding of prompts, and the values that turn them off
    "max_length": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "watermarking_config": (),
}
OF_ONE_SOURCE_LENGTH = {"encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,)}  # of sources, too
OF_PROMPTS_ONLY = {  # options that an encoder's sources do not get right, or not at all (transformers 5.24)
    "guidance_scale": (1, 1.0),
    "prefill_chunk_size": (),
}
REPLACED = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}  # options, and those that go before them
REFUSED = {  # options that are made of the prompts, that stop or change rows by the batch, or that change the result
    "input_ids": "the prompts are the second argument",
    "inputs": "the prompts are the second argument",
    "inputs_embeds": "prompts of tokens, or model.generate with padding on the left",
    "attention_mask": "leave it out: the prompts have lengths",
    "position_ids": "leave it out: transformers takes positions from the mask",
    "decoder_input_ids": "decoder_start_token_id=..., or model.generate with sources padded on the right",
    "decoder_attention_mask": "leave it out: targets begin with decoder_start_token_id",
    "encoder_outputs": "leave it out: the encoder is called with the sources",
    "return_dict_in_generate": "model.generate(**tdc.interop.to_hf(prompts, side='left'), ...)",
    "output_attentions": "leave it out: tokens come back alone",
    "output_hidden_states": "leave it out: tokens come back alone",
    "max_time": "max_new_tokens=...: time stops all rows at once",
    "stop_strings": "eos_token_id=[...], which ends each row",
    "diversity_penalty": EACH,
    "num_beam_groups": EACH,
}
NEUTRAL = {"diversity_penalty": 0.0, "num_beam_groups": 1}  # values of refused options that transformers has by default


def generate(model: Any, prompts: NestedTensor, **options: Any) -> NestedTensor:
    """The new tokens for each prompt, or each source of an encoder, up to and including the first end of sequence.

    transformers returns the prompts in front of them: `torch.cat([prompts, new], 1)`.

    Shapes:
        prompts `(B, -1)` -> `(B, -1)`; `(B * n, -1)` with `num_return_sequences=n`.

    Args:
        model: a model of transformers with a causal head, or of encoder and decoder, attended or not.
        prompts: whole numbers, one or more in each row; sources of a model of encoder and decoder.
        options: those of `GenerationConfig`, by name, as a `generation_config`, or in that of the model. An option that
            would give a row other tokens than it gets alone is refused.

    Raises:
        DtypeError: no such model, or no NestedTensor of whole numbers.
        ShapeError: a prompt without tokens.
        UnsupportedError: a model that cannot generate, or not from tokens, or an option that is refused.

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
    check_call(model, prompts)
    values = values_of(model, options)
    check_options(model, prompts, values)
    of_sources, pad = model.config.is_encoder_decoder, values.get("pad_token_id")
    padded = to_hf(prompts, side="right" if of_sources else "left", pad=0 if pad is None else pad)
    found: Tensor = model.generate(padded["input_ids"], attention_mask=padded["attention_mask"], **options)
    new = found[:, 1 if of_sources else padded["input_ids"].shape[1] :]  # targets begin with one token that is not new
    return from_padded(new, lengths=lengths_until(new, values.get("eos_token_id"))).to_packed()


def check_call(model: Any, prompts: Any) -> None:
    """A model that generates, and prompts of tokens."""
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
    text = message(OP, "prompts with tokens", "an empty one", hint="begin each with the token of the beginning")
    require((lengths_of(prompts.structure) > 0).all(), text, ShapeError)


def values_of(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """All options of a call: those of the model, of a `generation_config` before these, and by name before both."""
    config = library().GenerationConfig
    own, given = model.generation_config, options.get("generation_config")
    if given is not None and not isinstance(given, config):
        hint = "transformers.GenerationConfig(max_new_tokens=8)"
        raise DtypeError(message(OP, "a GenerationConfig as generation_config", describe(given), hint=hint))
    known = [name for name in vars(config()) if not name.startswith("_")]
    values = {name: x for one in (own, given) for name in known if (x := getattr(one, name, None)) is not None}
    return values | options


def check_options(model: Any, prompts: NestedTensor, values: dict[str, Any]) -> None:
    """An UnsupportedError that names the option for which a row would get other tokens than alone."""
    of_sources = model.config.is_encoder_decoder
    one_length = OF_ONE_SOURCE_LENGTH if of_sources else OF_ONE_PROMPT_LENGTH | OF_ONE_SOURCE_LENGTH
    taken = TAKEN.union(OF_ONE_PROMPT_LENGTH, OF_ONE_SOURCE_LENGTH)
    for name, x in values.items():
        if name not in taken and x is not None and x is not False and x != NEUTRAL.get(name):
            hint = REFUSED.get(name, EACH)
            raise UnsupportedError(message(OP, f"options without {name}", describe(x), hint=hint))
        if of_sources and name in OF_PROMPTS_ONLY and x is not None and x not in OF_PROMPTS_ONLY[name]:
            raise UnsupportedError(message(OP, f"sources without {name}", describe(x), hint="leave it out"))
    if values.get("cache_implementation") == "paged":
        hint = "model.generate_batch(...)"
        raise UnsupportedError(message(OP, "a cache_implementation of rectangles", "'paged'", hint=hint))
    lengths = lengths_of(prompts.structure).tolist()
    least, most = min(lengths, default=0), max(lengths, default=0)
    if least == most:
        return
    got = f"{least} to {most} tokens"
    for name, neutral in one_length.items():
        x = values.get(name)
        if x is not None and x not in neutral and values.get(REPLACED.get(name, "")) is None:
            hint = f"{REPLACED[name]}=..." if name in REPLACED else EACH
            raise UnsupportedError(message(OP, f"prompts of one length for {name}", got, hint=hint))
    check_context(model, most, got, values)


def check_context(model: Any, most: int, got: str, values: dict[str, Any]) -> None:
    """An UnsupportedError where the longest prompt would change how long or at which frequencies others go on."""
    new = values.get("max_new_tokens")
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if new is None and values.get("max_length") is None:
        new = 20
        if not model.config.is_encoder_decoder and room is not None and most + new > room:
            expected = f"max_new_tokens for prompts whose default of 20 ends at {room} positions"
            raise UnsupportedError(message(OP, expected, got, hint="max_new_tokens=..."))
    context = min(contexts_of(model), default=None)
    if context is not None and most + (new or 0) > context:
        expected = f"prompts of one length, or at most {context} positions where rotary frequencies follow the length"
        raise UnsupportedError(message(OP, expected, got, hint=EACH))


def lengths_until(tokens: Tensor, ends: Any) -> Tensor:
    """Number of tokens (B, L) up to the first that ends a row."""
    width = tokens.shape[1]
    if ends is None or not width:
        return torch.full(tokens.shape[:1], width, device=tokens.device)
    known = torch.as_tensor(ends, device=tokens.device).flatten()
    last = torch.isin(tokens, known)
    return torch.where(last.any(1), last.int().argmax(1) + 1, width)
