"""Write docs/architectures_hf.md: what `tdc.hf.attend` makes of each architecture of the installed transformers.

Each model type is built small from its configuration, with random weights, and attended. It is taken where its outputs
for a ragged batch are those of its rows alone, else refused in words. Anything else is an error of ours.

    python docs/tools/make_architectures_hf.py [NAME ...]
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import tdc

HEAD = """\
# Architectures of transformers

What `tdc.hf.attend` makes of each model type of transformers {version}. Of {all} types {built} can be built small from
their configuration, with random weights. {taken} of these are taken: for a ragged batch their outputs are those of each
row alone. The others are refused in words before they give a number. Models of images and sound are among them:
`attend` takes tokens. [Using tdc with Hugging Face](huggingface.md) says what a model must be.

`python docs/tools/make_architectures_hf.py` generates this page; a slow test with transformers compares it.

## With all their heads in every test

| family | attention | heads |
| --- | --- | --- |
| BERT, RoBERTa | full | base with pooler, masked and causal LM, tokens, sequences, pretraining, questions |
| ModernBERT | full and windows | base, masked LM, tokens, sequences, questions |
| GPT-2, Llama, Qwen3 | causal, shared heads | base, causal LM, tokens, sequences, questions |
| Qwen2, Mistral | causal, windows | the same |
| Gemma 2 | causal, windows, soft cap | the same, but questions |
| T5, BART, mBART, Pegasus, Marian, M2M100, Whisper | full, causal, cross | [base, conditional](encoder_decoder.md) |

Questions: question answering, without its loss."""
KINDS = {  # what a refusal says, and the title of its group
    "^(RAW|WRONG)": "ERRORS OF OURS",
    "fails: .*(get_input_embeddings|no attribute 'weight'|pixel_values|bbox)|features|action_embeds|position_embed": (
        "not a model of tokens"
    ),
    "expected a model of tokens": "one row of tokens fails in this configuration",
    "own attention": "attention of its own",
    "all of whose layers attend": "layers without attention",
    "attention mask|Packed": "computes with its attention mask",
    "attention sinks|bias of positions|mask is another": "weights of attention that packed rows do not have",
    "head may cross rows": "a head that may cross rows",
    "an output among": "outputs that may cross rows, such as a cache",
    "sees other rows|sees each row alone": "rows that see one another",
    "": "other reasons",
}
PAGE = Path(__file__).parents[1] / "architectures_hf.md"
LARGEST = 20_000_000  # weights of a model that counts as small
VOCABULARY = 100
MROPE = {"mrope_section": [2, 1, 1]}  # positions of text, height and width in a head of 8
LENGTHS, TARGETS = (7, 1, 12, 3), (2, 6, 1, 9)
SIZES = [  # names of whole numbers in configurations, and small values
    (r"pad_token_id", 0), (r"bos_token_id|decoder_start_token_id", 1), (r"eos_token_id|sep_token_id", 2),
    (r".*_token_(id|index)", 3), (r".*vocab_size(_per_layer_input)?", VOCABULARY),
    (r"(num_|n_)?(group|groups|topk_group|shared_experts|next_predict_layers|nextn_predict_layers)", 1),
    (r"(num_|n_).*experts?(_per_tok)?|.*top_?k.*", 2), (r".*lora_rank|.*_rank", 8),
    (r"qk_nope_head_dim|qk_rope_head_dim", 4),
    (r".*(head_dim|head_size|rotary_dim|d_kv|key_dim|value_dim|kv_channels)", 8),
    (r".*heads|n_head|num_attention_heads.*", 4), (r".*(layers?|blocks|depth|n_layer)", 2),
    (r".*(intermediate|ffn|d_ff|inner|mlp|feed_forward).*", 64), (r"(n_|max_).*(position|ctx|seq|target|source).*", 64),
    (r".*(image_size|input_size)", 32), (r".*patch_size", 8), (r".*(mel_bins|num_channels)", 8),
    (r".*(hidden_size|d_model|n_embd|dim|width|embedding_size|channels|hidden_dim.*)", 32),
]  # fmt: skip


def small(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration made small, by their names, with some more of its rotary embedding."""
    layers = values.get("num_hidden_layers", values.get("num_layers", values.get("n_layer")))
    out: dict[str, Any] = {}
    for name, x in values.items():
        if name.startswith("rope") and isinstance(x, dict):
            out[name] = {key: MROPE["mrope_section"] if key == "mrope_section" else y for key, y in x.items()} | rope
        elif isinstance(x, dict) and not name.startswith(("id2label", "label2id")):
            out[name] = small(x, rope)
        elif isinstance(x, list) and x and len(x) == layers:
            out[name] = x[:1] + x[-1:]  # one of the first kind of layer, and one of the last
        elif isinstance(x, int) and not isinstance(x, bool):
            out[name] = smaller(name, x, values)
        else:
            out[name] = x
    return out


def smaller(name: str, x: int, values: dict[str, Any]) -> int:
    """A whole number of a configuration made small."""
    if "key_value_heads" in name and x != values.get("num_attention_heads"):
        return 2
    if name == "head_dim" and x == values.get("qk_rope_head_dim"):
        return 4
    fit = next((n for pattern, n in SIZES if re.fullmatch(pattern, name)), x)
    return fit if name.endswith(("_id", "_index")) else min(x, fit)


def build(name: str, rope: dict[str, Any]) -> Any:
    """A small model of a model type; None where its configuration makes none."""
    found = modeling_auto.MODEL_MAPPING_NAMES[name]
    try:
        config_class = transformers.CONFIG_MAPPING[name]
        model_class = getattr(transformers, found if isinstance(found, str) else found[0])
        values = config_class().to_dict()
        values = {key: x for key, x in values.items() if key not in ("transformers_version", "model_type")}
        config = config_class(**small(values, rope))
        with torch.device("meta"):
            if sum([p.numel() for p in model_class(copy.deepcopy(config)).parameters()]) > LARGEST:
                return None
        torch.manual_seed(0)
        model = model_class(config).eval()
    except Exception as error:
        if "-v" in sys.argv:
            print(name, "not built", repr(error)[:300])
        return None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2)
    return model


def outcome(model: Any) -> str | None:
    """What `attend` makes of a model: "", the reason for which it is refused, or an error of ours in capitals."""
    if model is None:
        return None
    other = copy.deepcopy(model)
    try:
        tdc.hf.attend(model)
        return difference(model, other)
    except tdc.TdcError as error:
        return reason(str(error), type(model).__name__)
    except Exception as error:
        return f"RAW {error!r}"


def difference(model: Any, other: Any) -> str:
    """Nothing where the outputs of a ragged batch are those of its rows alone."""
    if model.main_input_name != "input_ids":
        return ""  # of Whisper's kin, which `attend` itself has compared
    torch.manual_seed(1)
    count = model.get_input_embeddings().weight.shape[0]
    batch = {"input_ids": tdc.pack([torch.randint(3, count, (n,)) for n in LENGTHS])}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tdc.pack([torch.randint(3, count, (n,)) for n in TARGETS])
    plain = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with torch.no_grad():
        out = model(**batch)[0]
        for i in range(len(LENGTHS)):
            row = {name: x[i][None] for name, x in batch.items()} | plain
            one: Tensor = other(**row)[0][0]
            if not torch.allclose(out[i], one, rtol=1e-3, atol=1e-4 * float(one.abs().max())):
                return f"WRONG by {float((out[i] - one).abs().max())}"
    return ""


def reason(text: str, name: str) -> str:
    """The reason in an error, without the name of the model."""
    return text.partition("\n")[0].partition(": ")[2].replace(name, "...")


def outcomes(names: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each model type and what becomes of it; None of one that is not built."""
    transformers.logging.set_verbosity_error()
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = outcome(build(name, {}))
            yield name, outcome(build(name, MROPE)) if text and "split_with_sizes" in text else text


def kind(text: str) -> str:
    """The group that a refusal belongs to."""
    return next(group for pattern, group in KINDS.items() if re.search(pattern, text))


def render(found: dict[str, str | None]) -> str:
    """The page."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, text in found.items():
        if text:
            groups[kind(text)].append(name)
    taken = [name for name, text in found.items() if text == ""]
    left_out = [name for name, text in found.items() if text is None]
    counts = {"all": len(found), "built": len(found) - len(left_out), "taken": len(taken)}
    head = HEAD.format(version=transformers.__version__, **counts)
    parts = [head, listed("Each row as alone", taken)]
    parts += [listed(f"Refused: {group}", groups[group]) for group in KINDS.values() if group in groups]
    return "\n\n".join([*parts, listed("Not built small from a configuration", left_out)]) + "\n"


def listed(title: str, names: list[str]) -> str:
    """A section of names."""
    return f"## {title} ({len(names)})\n\n{fill(', '.join(sorted(names)) + '.', 118, break_on_hyphens=False)}"


def everything() -> dict[str, str | None]:
    """All model types of the installed transformers."""
    return dict(outcomes(list(modeling_auto.MODEL_MAPPING_NAMES)))


if __name__ == "__main__":
    if sys.argv[1:]:
        for name, text in outcomes([name for name in sys.argv[1:] if name != "-v"]):
            print(name, repr(text), flush=True)
    else:
        found = everything()
        PAGE.write_text(render(found), encoding="utf-8")
        print([(name, text) for name, text in found.items() if text and text.startswith(("RAW", "WRONG"))])
