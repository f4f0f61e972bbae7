"""Supervised fine-tuning of a model of transformers: LoRA, packed rows, masked prompts, a checkpoint to resume from.

    pip install 'torch-tdc[hf]'
    python examples/finetune.py

A prompt is a row of numbers, and its answer counts down from the last one. The model is a small Llama with weights from
its configuration, which stay as they are: adapters are trained, and are all that a checkpoint holds beside the state of
the optimiser. Rows are packed, so that nothing is padded, and the loss is that of the answers alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import tdc
from tdc import TensorDict, from_module, functional_call
from tdc.compile import train_step
from tdc.nn import lora_init, lora_merge
from tdc.optim import adamw, chain, clip_by_global_norm, cosine

END, NUMBERS, STEPS, ROWS = 0, 12, 160, 32  # tokens: END, then the numbers 0, 1, ... as 1, 2, ...


def base() -> Any:
    """A small Llama; `from_pretrained` of yours."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=NUMBERS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        bos_token_id=None, eos_token_id=END, pad_token_id=None,
    )  # fmt: skip
    return tdc.hf.attend(transformers.LlamaForCausalLM(config))


def conversation(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A prompt and its answer."""
    length = int(torch.randint(1, 9, (), generator=generator))
    prompt = torch.randint(1, NUMBERS + 1, (length,), generator=generator)
    return prompt, torch.arange(int(prompt[-1]) - 1, END - 1, -1)


def batch(seed: int) -> TensorDict:
    """Rows of prompt and answer; labels of prompts are -100, which losses of transformers leave out."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [conversation(generator) for _ in range(ROWS)]
    ids = [torch.cat(pair) for pair in drawn]
    labels = [torch.cat([torch.full_like(prompt, -100), answer]) for prompt, answer in drawn]
    rows = tdc.pack(ids)
    return TensorDict({"input_ids": rows, "labels": rows.with_values(torch.cat(labels))}, [ROWS])


def size_of(params: TensorDict) -> int:
    """How many numbers there are."""
    return sum([x.numel() for x in params.values(True, True) if isinstance(x, Tensor)])


def main() -> None:
    model = base()
    params = from_module(model, buffers=False).detach()
    adapters = lora_init(params, rank=8, alpha=16, select=["*_proj.weight", "lm_head.weight"])

    def loss(adapters: TensorDict, batch: TensorDict) -> Tensor:
        inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        return functional_call(model, lora_merge(params, adapters), (), inputs).loss

    step = train_step(loss, chain(clip_by_global_norm(1.0), adamw(cosine(2e-2, STEPS, warmup=10))))
    state, losses = step.init(adapters), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-80.pt"
        for i in range(STEPS):
            if i == STEPS // 2:
                torch.save(tdc.interop.to_state_dict(state), path)
            state, metrics = step(state, batch(i))
            losses.append(float(metrics["loss"]))
            if i % 40 == 0 or i == STEPS - 1:
                print(f"step {i:3d}  loss {losses[-1]:.3f}")
        size = path.stat().st_size
        resumed, again = step.load_state_dict(step.init(adapters), torch.load(path, weights_only=True)), []
    for i in range(STEPS // 2, STEPS):  # as another process would go on
        resumed, metrics = step(resumed, batch(i))
        again.append(float(metrics["loss"]))
    print(f"{size_of(state['params'])} numbers trained beside {size_of(params)}, {size // 1024} KB saved")
    print(f"resumed with the same losses: {again == losses[STEPS // 2 :]}")

    model.load_state_dict(tdc.interop.to_state_dict(lora_merge(params, state["params"])))
    generator = torch.Generator().manual_seed(STEPS)
    drawn = [conversation(generator) for _ in range(50)]
    prompts = tdc.pack([prompt for prompt, _ in drawn])
    found = tdc.hf.generate(model, prompts, max_new_tokens=NUMBERS + 1, do_sample=False).tolist()
    right = sum([ours == answer.tolist() for ours, (_, answer) in zip(found, drawn, strict=True)])
    counts = step.counts
    print(f"{right} of {len(drawn)} answers right")
    print(f"graphs {counts.graphs}, breaks {counts.breaks}, compiles {counts.compiles}")
    assert right > 0.8 * len(drawn), "it has not learned"


if __name__ == "__main__":
    main()
