"""What `tdc.hf.attend` refuses of models of encoder and decoder, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc

transformers: Any = pytest.importorskip("transformers")

from hf_encoder_decoder import BART, CONDITIONAL, T5, build_encoder_decoder  # noqa: E402 - behind the skip
from hf_models import refused, tokens  # noqa: E402 - behind the skip

from tdc.hf import attend  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
X, Y, OTHER = tokens((3, 1)), tokens((2, 4)), tokens((4, 2))
DENSE = torch.ones(2, 3).long()
VECTORS = X.with_values(torch.ones(4))
ARGUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no targets": ("Bart", {"labels": None}, "decoder_input_ids or decoder_inputs_embeds or labels as a NestedTensor"),
    "no sources": ("Bart", {"input_ids": None}, "input_ids or inputs_embeds as a NestedTensor"),
    "no features": ("Whisper", {"input_ids": None}, "expected input_features (B, F, T), got no such argument"),
    "dense sources": ("Bart", {"input_ids": DENSE}, "at input_ids: Tensor int64[2, 3]"),
    "dense labels": ("Bart", {"labels": DENSE, "decoder_input_ids": Y}, "at labels: Tensor int64[2, 3]"),
    "dense targets": ("Bart", {"decoder_input_ids": DENSE}, "at decoder_input_ids: Tensor int64[2, 3]"),
    "padded labels": ("Bart", {"labels": Y.to_padded()}, "x.to_packed()"),
    "targets of other rows": ("Bart", {"decoder_input_ids": OTHER}, "labels of the structure of the tokens"),
    "fewer targets": ("Bart", {"labels": tokens((2,))}, "as many targets as sources, got 1 for 2"),
    "targets that are no numbers": (
        "Bart", {"labels": None, "decoder_input_ids": VECTORS}, "decoder_inputs_embeds=x for vectors",
    ),
    "a list of sources": ("Bart", {"input_ids": [[3], [4]]}, "at input_ids: list"),
    "a list of labels": ("T5", {"labels": [[3], [4]], "decoder_input_ids": Y}, "at labels: list"),
    "a list of features": ("Whisper", {"input_ids": None, "input_features": [1]}, "a Tensor of features (B, F, T)"),
    "a mask beside sources": ("Bart", {"attention_mask": DENSE}, "the rows have lengths"),
    "a mask beside targets": ("T5", {"decoder_attention_mask": DENSE}, "the rows have lengths"),
    "outputs of an encoder": ("T5", {"encoder_outputs": (torch.ones(1),)}, "the encoder is called with the same rows"),
    "a cache": ("T5", {"use_cache": True}, "use_cache=False"),
    "weights": ("Bart", {"output_attentions": True}, "output_attentions"),
    "kinds of tokens": ("Bart", {"token_type_ids": X}, "td.exclude(name)"),
    "positions of sources": ("Bart", {"position_ids": X}, "td.exclude(name)"),
    "features that are ragged": (
        "Whisper", {"input_ids": None, "input_features": tdc.pack([torch.ones(8, 3)])}, "features of one length",
    ),
    "features that are fewer": (
        "Whisper", {"input_ids": None, "input_features": torch.ones(1, 8, 20)},
        "as many targets as sources, got 2 for 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str):
    family, arguments, text = ARGUMENTS[case]
    model = attend(build_encoder_decoder(family))
    refused(lambda: model(**{"input_ids": X, "labels": Y, **arguments}), text)


def test_features_that_a_model_masks():
    model = attend(build_encoder_decoder("Whisper", apply_spec_augment=True))
    batch = {"input_features": torch.randn(2, 8, 20), "labels": Y}
    assert model(**batch).logits.lengths.tolist() == [2, 4]
    refused(lambda: model.train()(**batch), "model.config.apply_spec_augment = False")


# Models whose rows see one another, or whose attention is another.


def configured(name: str, head: str = CONDITIONAL, **options: Any) -> Any:
    sizes = T5 if "T5" in name or name == "SwitchTransformers" else BART
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**{**sizes, **options})).eval()


MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "classes": ("Bart", "ForSequenceClassification", {}, "attend(BartForSequenceClassification.base_model)"),
    "answers": ("Bart", "ForQuestionAnswering", {}, "whose head may cross rows"),
    "a decoder by itself": ("Bart", "ForCausalLM", {}, "BartForCausalLM, which sees other rows"),
    "tuples": ("Bart", CONDITIONAL, {"return_dict": False}, "model.config.return_dict = True"),
    "experts that are full": ("SwitchTransformers", CONDITIONAL, {}, "whose experts take so many tokens of a batch"),
    "experts of translation": ("NllbMoe", CONDITIONAL, {}, "whose experts take so many tokens of a batch"),
    "blocks": ("LongT5", CONDITIONAL, {}, ""),
    "blocks of a decoder": ("PegasusX", CONDITIONAL, {}, ""),
    "windows": ("LED", CONDITIONAL, {"attention_window": 4, "max_encoder_position_embeddings": 16}, ""),
    "sparse attention": ("BigBirdPegasus", CONDITIONAL, {}, ""),
    "attention of its own": ("Mvp", CONDITIONAL, {}, "which has its own attention"),
    "other sound": ("Speech2Text", CONDITIONAL, {"max_source_positions": 40}, "whose features have another form"),
    "images": ("Pix2Struct", CONDITIONAL, {}, "which fails: You have to specify flattened_patches"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str):
    name, head, options, text = MODELS[case]
    if name == "Pix2Struct":
        small = {"hidden_size": 16, "num_heads": 2, "num_layers": 1}
        options = {"text_config": small, "vision_config": {**small, "num_hidden_layers": 1, "num_attention_heads": 2}}
    model = configured(name, head, **options)
    before = model.config._attn_implementation
    refused(lambda: attend(model), text)
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)
    assert not any([m._forward_pre_hooks for m in model.modules()])


def test_an_encoder_that_looks_at_its_neighbour():
    model = build_encoder_decoder("T5")
    layer = model.encoder.block[0].layer[0]
    layer.register_forward_hook(lambda layer, args, out: (out[0] + out[0].roll(1, 1), *out[1:]))
    refused(lambda: attend(model), "which sees other rows\nat logits: off by ")


def test_a_decoder_that_looks_ahead():
    model = build_encoder_decoder("Bart")
    model.model.decoder.layers[1].self_attn.is_causal = False
    refused(lambda: attend(model), "BartAttention, whose mask is another than causal=False, window=None")
