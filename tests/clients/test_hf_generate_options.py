"""Each option of GenerationConfig, and 120 programs of several: rows as alone, or the option is refused.

Draws are made the same for a row wherever it is: the largest probabilities are taken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tdc

transformers: Any = pytest.importorskip("transformers")

from hf_encoder_decoder import build_encoder_decoder  # noqa: E402 - behind the skip
from hf_models import DECODER, build, refused, tokens, with_large_weights  # noqa: E402 - behind the skip

from tdc.hf import generate  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
ENDS = [2, *range(10, 16)]
BEAMS = {"num_beams": 3}
SAMPLED = {"do_sample": True}
ASSISTED = {  # options of an assistant, without effect where there is none
    "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.5,
    "max_matching_ngram_size": 2, "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {  # options that rows take whatever the padding, with what they need
    "max_new_tokens": {}, "min_new_tokens": {"min_new_tokens": 5}, "eos_token_id": {"eos_token_id": 5},
    "early_stopping": {"early_stopping": True, **BEAMS}, "num_beams": BEAMS, "do_sample": SAMPLED,
    "length_penalty": {"length_penalty": 2.0, **BEAMS}, "num_return_sequences": {"num_return_sequences": 2, **BEAMS},
    "temperature": {"temperature": 0.5, **SAMPLED}, "top_k": {"top_k": 5, **SAMPLED},
    "top_p": {"top_p": 0.5, **SAMPLED},
    "min_p": {"min_p": 0.2, **SAMPLED}, "top_h": {"top_h": 0.5, **SAMPLED}, "typical_p": {"typical_p": 0.5, **SAMPLED},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, **SAMPLED}, "eta_cutoff": {"eta_cutoff": 0.02, **SAMPLED},
    "repetition_penalty": {"repetition_penalty": 1.7}, "renormalize_logits": {"renormalize_logits": True, **BEAMS},
    "remove_invalid_values": {"remove_invalid_values": True}, "suppress_tokens": {"suppress_tokens": [9, 10, 20]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [9, 10, 20, 30]},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5)},
    "guidance_scale": {"guidance_scale": 1.5}, "pad_token_id": {"pad_token_id": 3}, "bos_token_id": {"bos_token_id": 4},
    "decoder_start_token_id": {"decoder_start_token_id": 5}, "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"}, "max_cache_len": {"max_cache_len": 64},
    "cache_config": {"cache_config": {}}, "prefill_chunk_size": {"prefill_chunk_size": 2},
    "compile_config": {"compile_config": transformers.CompileConfig()}, "disable_compile": {"disable_compile": True},
    "output_scores": {"output_scores": True}, "output_logits": {"output_logits": True},
    **{name: {name: x} for name, x in ASSISTED.items()},
}  # fmt: skip
OF_ONE_LENGTH: dict[str, Any] = {  # options that read or count the padding of prompts
    "max_length": 16, "min_length": 6, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [0, 11], [11, 12]],
    "sequence_bias": [[[9], 5.0], [[0, 11], 5.0]], "forced_bos_token_id": 9,
    "watermarking_config": {"bias": 5.0},
}  # fmt: skip
OF_ONE_SOURCE_LENGTH: dict[str, Any] = {"encoder_repetition_penalty": 1.7, "encoder_no_repeat_ngram_size": 2}
REFUSED: dict[str, Any] = {
    "max_time": 9.0, "stop_strings": ["a"], "use_mtp": True, "token_healing": True, "output_attentions": True,
    "output_hidden_states": True, "return_dict_in_generate": True, "is_assistant": True, "prompt_lookup_num_tokens": 2,
    "assistant_early_exit": 1, "continuous_batching_config": {}, "low_memory": True, "penalty_alpha": 0.5,
    "dola_layers": "low", "diversity_penalty": 0.5, "num_beam_groups": 3, "constraints": [1], "force_words_ids": [[5]],
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {  # of `generate`, besides the configuration
    "stopping_criteria": [lambda ids, scores: ids[:, -1] == 5], "logits_processor": [lambda ids, scores: scores],
    "prefix_allowed_tokens_fn": lambda batch, ids: [5], "assistant_model": object(), "streamer": object(),
    "negative_prompt_ids": torch.ones(1, 1), "custom_generate": "here", "token_type_ids": torch.ones(1, 1), "ends": 3,
}  # fmt: skip
MODELS = {"Llama": lambda: build("Llama", "ForCausalLM"), "T5": lambda: build_encoder_decoder("T5")}
OF_PROMPTS_ONLY = ("guidance_scale", "prefill_chunk_size")


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "multinomial", lambda p, num_samples, **options: p.topk(num_samples).indices)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def until(row: list[int], ends: list[int]) -> list[int]:
    """Tokens up to the first that ends a row."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def alone(model: Any, x: tdc.NestedTensor, options: dict[str, Any]) -> list[list[int]]:
    """The new tokens of each row as a batch of one."""
    ends, rows = options.get("eos_token_id") or [], []
    for row in x:
        new = model.generate(row[None], attention_mask=torch.ones(1, len(row)).long(), **options)
        begin = 1 if model.config.is_encoder_decoder else len(row)
        rows += [until(each[begin:].tolist(), ends if isinstance(ends, list) else [ends]) for each in new]
    return rows


def right(model: Any, x: tdc.NestedTensor, options: dict[str, Any]) -> None:
    assert generate(model, x, **options).tolist() == alone(model, x, options)


def base(name: str = "") -> dict[str, Any]:
    return {"eos_token_id": ENDS} | ({} if name == "max_length" else {"max_new_tokens": 7})


def test_each_option_is_in_one_table():
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    tables = [*RIGHT, *OF_ONE_LENGTH, *OF_ONE_SOURCE_LENGTH, *REFUSED]
    assert sorted(tables) == sorted(names - {"transformers_version"})


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", RIGHT)
def test_options_that_see_new_tokens_only(family: str, name: str):
    model, x, options = MODELS[family](), tokens((7, 1, 12)), base() | RIGHT[name]
    if family == "T5" and name in OF_PROMPTS_ONLY:
        refused(lambda: generate(model, x, **options), f"expected sources without {name}")
    else:
        right(model, x, options)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", [*OF_ONE_LENGTH, *OF_ONE_SOURCE_LENGTH])
def test_options_that_read_the_prompt(family: str, name: str):
    model, options = MODELS[family](), base(name) | {name: (OF_ONE_LENGTH | OF_ONE_SOURCE_LENGTH)[name]}
    if name == "watermarking_config":
        options[name] = transformers.WatermarkingConfig(**options[name])
    if family == "T5" and name in OF_ONE_LENGTH:
        right(model, tokens((7, 1, 12)), options)
    elif name == "min_length":  # which transformers takes min_new_tokens before
        refused(lambda: generate(model, tokens((7, 1)), **options), "expected prompts of one length for min_length")
        right(model, tokens((7, 1)), options | {"min_new_tokens": 5})
    else:
        refused(lambda: generate(model, tokens((7, 1)), **options), f"expected prompts of one length for {name}")
    right(model, tokens((5, 5)), options)


@pytest.mark.parametrize("given", ["by name", "configuration", "of the model"])
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name: str, given: str):
    model, options = build("Llama", "ForCausalLM"), {"max_new_tokens": 3}
    if given == "by name":
        options[name] = REFUSED[name]
    else:
        config = transformers.GenerationConfig(max_new_tokens=3)
        setattr(config, name, REFUSED[name])
        options = {"generation_config": config} if given == "configuration" else {}
        model.generation_config = config if given == "of the model" else model.generation_config
    refused(lambda: generate(model, tokens(), **options), f"expected options without {name}, got ")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_are_refused(name: str):
    model, options = build("Llama", "ForCausalLM"), {name: ARGUMENTS[name]}
    refused(lambda: generate(model, tokens(), **options), f"expected options without {name}, got ")


def test_a_configuration_is_read():
    """Rows end at its end of sequence, and at that of the model."""
    model, x = build("Llama", "ForCausalLM"), tokens((7, 1, 12))
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    ends = [alone(model, x, {**options, "eos_token_id": None})[0][3], 2]
    expected = alone(model, x, {**options, "eos_token_id": ends})
    assert len(expected[0]) < 7
    config = transformers.GenerationConfig(**options, eos_token_id=ends)
    assert generate(model, x, generation_config=config).tolist() == expected
    model.generation_config = config
    assert generate(model, x).tolist() == expected
    refused(lambda: generate(model, x, generation_config={"max_new_tokens": 3}), "expected a GenerationConfig as gener")


def test_values_that_change_nothing():
    """They are defaults of transformers, or off."""
    model, x = build("Llama", "ForCausalLM"), tokens((7, 1, 12))
    neutral = {"min_length": 0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1}
    neutral |= {"encoder_no_repeat_ngram_size": 0, "diversity_penalty": 0.0, "max_time": None, "low_memory": False}
    assert generate(model, x, **base(), **neutral).tolist() == alone(model, x, base())


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_number_of_tokens_ends_where_positions_do():
    model = build("Llama", "ForCausalLM", max_position_embeddings=30)
    refused(lambda: generate(model, tokens((12, 3)), eos_token_id=None), "max_new_tokens for prompts whose default")
    assert generate(model, tokens((10, 3)), eos_token_id=None).lengths.tolist() == [20, 20]
    assert generate(model, tokens((12, 12)), eos_token_id=None).lengths.tolist() == [18, 18]


def test_rotary_frequencies_that_follow_the_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**{**DECODER, "max_position_embeddings": 16, "rope_parameters": rope})
    model = with_large_weights(transformers.LlamaForCausalLM(config))
    right(model, tokens((9, 2)), base())
    refused(lambda: generate(model, tokens((12, 2)), **base()), "where rotary frequencies follow the length")
    right(model, tokens((12, 12)), base())


def program(seed: int) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """A model, the lengths of prompts, and options, drawn by a seed."""
    draw = random.Random(seed)
    values = {name: {name: x} for name, x in (OF_ONE_LENGTH | OF_ONE_SOURCE_LENGTH | REFUSED).items()}
    values["watermarking_config"] = {"watermarking_config": transformers.WatermarkingConfig(bias=5.0)}
    rare = draw.random() < 0.25
    names = draw.sample([*RIGHT], draw.randint(2, 5)) + draw.sample([*values], draw.randint(1, 2) if rare else 0)
    options: dict[str, Any] = {"max_new_tokens": draw.randint(1, 7), "eos_token_id": ENDS}
    for name in names:
        options |= (RIGHT | values)[name]
    if options.get("num_return_sequences", 1) > 1 and options.get("num_beams") is None:
        options["do_sample"] = True
    one = draw.random() < 0.2
    lengths = (draw.randint(1, 9),) * 3 if one else tuple(draw.sample(range(1, 14), 3))
    return draw.choice([*MODELS]), lengths, options


def found(model: Any, x: tdc.NestedTensor, options: dict[str, Any]) -> list[list[int]] | str:
    """The new tokens of a batch, or the words of a refusal."""
    try:
        return generate(model, x, **options).tolist()
    except tdc.UnsupportedError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("tens", range(12))
def test_programs(tens: int):
    """At least half of ten give tokens; the others are refused by the name of one of their options."""
    given = 0
    for seed in range(10 * tens, 10 * tens + 10):
        family, lengths, options = program(seed)
        torch.manual_seed(seed)
        model, x = MODELS[family](), tokens(lengths)
        new = found(model, x, options)
        if isinstance(new, str):
            assert any([name in new for name in options]), (seed, new)
        else:
            given += 1
            assert new == alone(model, x, options), (seed, family, lengths, options)
    assert given >= 5
