"""What does a training step of stock transformers cost on ragged batches, against padding and its own packed form?

BERT and Llama of 4 layers in the shape of BERT base (768 features, 12 heads), built from configurations, with the loss
of masked or of causal language modelling; 8 rows of at most 256 tokens, which fill 20 % of their rectangle:

    tdc       the model after `tdc.hf.attend`, on a NestedTensor (B, -1)
    padded    the model with `sdpa` on tokens (B, L) and their mask, with to_hf
    packed    the model with `sdpa` on all rows as one sequence (1, N) with positions of each row. Llama finds the rows
              by the positions, and makes the mask (1, 1, N, N) of pairs in rows; BERT does not, and is given the mask

BART and T5 of 4 and 4 layers in the same shape have these rows as sources, and as targets in the opposite order; stock
models of encoder and decoder have no packed form.

transformers' other ways to run packed rows need a GPU (flash attention; flex_attention has no backward on CPU). A step
is forward, backward and a fused AdamW, eager, on one thread; gradients keep their memory, so that a peak is that of
activations. Losses agree to 1e-4, which is checked, without dropout, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import tdc
from bench._timing import Report, Spread, arguments, in_turns, peer, ratio
from tdc.compile import peak_bytes

LENGTHS = (256, 39, 32, 25, 21, 16, 12, 9)  # 20 % of their rectangle
WORDS = 30522
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
LIKE_BART = {
    "vocab_size": WORDS, "d_model": 768, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 512,
}  # fmt: skip
LIKE_T5 = {
    "vocab_size": WORDS, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 4, "num_heads": 12,
    "decoder_start_token_id": 0,
}  # fmt: skip
LIMITS = {"padded": 0.35, "packed": 1.05}
CASES = {  # what is measured: configuration and model of transformers, options
    "BERT": ("BertConfig", "BertForMaskedLM", SHAPE),
    "BERT without dropout": (
        "BertConfig", "BertForMaskedLM", {**SHAPE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SHAPE),
    "BART": ("BartConfig", "BartForConditionalGeneration", LIKE_BART),
    "T5": ("T5Config", "T5ForConditionalGeneration", LIKE_T5),
}  # fmt: skip


def inputs_of(model: str, x: Any, labels: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each candidate."""
    padded = tdc.interop.to_hf(tdc.TensorDict({"input_ids": x, "labels": labels}, [len(x)]), pad={"labels": -100})
    positions = tdc.positions(x).values[None]
    first = labels.values.masked_fill(positions[0] == 0, -100) if model.startswith("Llama") else labels.values
    packed = {"input_ids": x.values[None], "position_ids": positions, "labels": first[None]}
    if model.startswith("Llama"):  # whose cache, which is on unless it is said, would make it see all rows as one
        packed["use_cache"] = padded["use_cache"] = False
    else:
        row = torch.repeat_interleave(x.lengths)
        packed["attention_mask"] = (row[:, None] == row)[None, None]
    return {"tdc": {"input_ids": x, "labels": labels}, "padded": padded, "packed": packed}


def pair_inputs(x: Any, y: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each candidate for a model of encoder and decoder."""
    padded = tdc.interop.to_hf(x)
    del padded["position_ids"]
    return {
        "tdc": {"input_ids": x, "labels": y},
        "padded": {**padded, "labels": y.to_padded(-100).data, "use_cache": False},
    }


def build(library: Any, config: str, model: str, options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The model of each candidate, with the same weights."""
    models: dict[str, Any] = {}
    for name in names:
        made = getattr(library, model)(getattr(library, config)(**options))
        made.set_attn_implementation("sdpa")
        if models:
            made.load_state_dict(models["tdc"].state_dict())
        models[name] = tdc.hf.attend(made) if name == "tdc" else made
    return models


def step_of(model: Any, given: dict[str, Any]) -> Callable[[], None]:
    """A step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(**given).loss.backward()
        optimizer.step()

    return step


def measure(report: Report, library: Any, what: str, rounds: int) -> None:
    """One model: losses, times and peaks."""
    config, name, options = CASES[what]
    torch.manual_seed(0)
    x = tdc.pack([torch.randint(1000, WORDS, (n,)) for n in LENGTHS])
    chosen = torch.rand(x.values.shape) < (1 if "Llama" in what else 0.15)
    count = x.values.shape[0]
    report.note(f"{what}: {count} tokens, {count / (len(x) * max(LENGTHS)):.0%} of the rectangle")
    if name.endswith("ForConditionalGeneration"):
        given = pair_inputs(x, tdc.pack(list(x)[::-1]))
    else:
        given = inputs_of(name, x, x.with_values(torch.where(chosen, x.values, -100)))
    models = build(library, config, name, options, given)
    losses: dict[str, Tensor] = {n: m.eval()(**given[n]).loss.detach() for n, m in models.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4 * max(losses.values()), losses
    steps = {n: step_of(m.train(), given[n]) for n, m in models.items()}
    times = in_turns(steps, rounds)
    peaks = {n: peak_bytes(step) for n, step in steps.items()}
    report.row(what, times, "padded", **{f"MB {n}": round(peak / 1e6, 1) for n, peak in peaks.items()})
    for other, limit in [(other, LIMITS[other]) for other in given if other != "tdc"]:
        report.limit(f"{what}: time of tdc to {other}", ratio(times["tdc"], times[other]), limit)
        share = peaks["tdc"] / peaks[other]
        report.limit(f"{what}: peak of tdc to {other}", Spread(share, share, share), limit)


def main() -> None:
    args = arguments("bench_hf")
    question = "What does a training step of stock transformers cost on ragged batches, against padded and packed ones?"
    report = Report("bench_hf", question, args.device, args.quick)
    library = peer("transformers", report)
    if library is None:
        return
    report.version(library)
    for what in list(CASES)[:1] if args.quick else CASES:
        measure(report, library, what, 2 if args.quick else 5)
    report.write()


if __name__ == "__main__":
    main()
