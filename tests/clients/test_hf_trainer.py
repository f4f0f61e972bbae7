"""The Trainer of transformers, whose batches are its own packed form (1, N)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hf_encoder_decoder import build_encoder_decoder  # noqa: E402 - behind the skip
from hf_models import build, labels_for, loss_alone, tokens, twin  # noqa: E402 - behind the skip
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - behind the skip

from tdc.hf import attend  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
HEADS = [
    ("Bert", "ForTokenClassification"),
    ("Llama", "ForCausalLM"),
    ("Mistral", "ForCausalLM"),
    ("Roberta", "ForMaskedLM"),
]


def collator(**options: Any) -> Any:
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)


def features(x: tdc.NestedTensor, labels: tdc.NestedTensor) -> list[dict[str, list[int]]]:
    rows = zip(x.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": ids, "labels": own} for ids, own in rows]


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_the_packed_form_of_transformers(family: str, head: str):
    model = build(family, head)
    alone, x = twin(model), tokens()
    labels = labels_for(head, x)
    labels = labels.with_values(labels.values.masked_fill(tdc.positions(x).values == 0, -100))  # as the collator does
    batch = collator(position_ids_start=2 if family == "Roberta" else 0)(features(x, labels))
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    out = attend(model)(**batch)
    assert_close(out.loss, loss_alone(alone, head, x, labels), **TOLERANCE)
    for row, ours in zip(x, out.logits[0].split(x.lengths.tolist()), strict=True):
        assert_close(ours, alone(row[None]).logits[0], **TOLERANCE)


def rows_are_alone(out: Any, alone: Any, x: tdc.NestedTensor) -> None:
    for row, ours in zip(x, out[0][0].split(x.lengths.tolist()), strict=True):
        assert_close(ours, alone(input_ids=row[None])[0][0], **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}])
@pytest.mark.parametrize(("family", "head"), [("Bert", "Model"), *HEADS, ("GPT2", "LMHeadModel")])
def test_the_packed_form_without_offsets(family: str, head: str, options: dict[str, Any]):
    """It is known by positions that begin anew, and by offsets of keys alone."""
    model = build(family, head)
    alone, x = twin(model), tokens()
    start = 2 if family == "Roberta" else 0
    batch = transformers.DataCollatorWithFlattening(position_ids_start=start, **options)(features(x, x))
    batch = {name: value for name, value in batch.items() if name not in ("labels", "cu_seq_lens_q", "max_length_q")}
    rows_are_alone(attend(model)(**batch), alone, x)


def test_the_packed_form_of_one_row():
    model, x = build("Llama", "ForCausalLM"), tokens((5,))
    alone = twin(model)
    batch = transformers.DataCollatorWithFlattening()(features(x, x))
    assert_close(attend(model)(**batch).logits, alone(**batch).logits, **TOLERANCE)


def test_the_packed_form_without_offsets_in_a_graph():
    """A graph takes one row with its positions, and asserts that there is one."""
    model = attend(build("Llama", "ForCausalLM"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for lengths in ((5,), (7,)):
        batch = transformers.DataCollatorWithFlattening()(features(*[tokens(lengths)] * 2))
        assert_close(compiled(**batch).loss, model(**batch).loss, **TOLERANCE)
    with pytest.raises(RuntimeError, match="expected cu_seq_lens_q beside position_ids that begin anew"):
        compiled(**transformers.DataCollatorWithFlattening()(features(*[tokens((3, 4))] * 2)))


def test_offsets_of_queries_and_of_keys_are_equal():
    x = tokens()
    batch = collator()(features(x, x))
    for other in (batch["cu_seq_lens_k"][:-1], batch["cu_seq_lens_k"].clamp(max=9)):
        with pytest.raises(tdc.ShapeError, match="expected cu_seq_lens_q and cu_seq_lens_k that are equal"):
            attend(build("Bert", "Model"))(**{**batch, "cu_seq_lens_k": other})


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}])
def test_the_packed_form_has_no_sources_and_targets(options: dict[str, Any]):
    x = tokens()
    with pytest.raises(tdc.UnsupportedError, match="expected sources and targets, got rows packed by DataCollator"):
        attend(build_encoder_decoder("T5"))(**transformers.DataCollatorWithFlattening(**options)(features(x, x)))


def test_smoothed_labels():
    """The Trainer's loss with label_smoothing_factor is that of the rows, of the packed form."""
    smooth = transformers.trainer_pt_utils.LabelSmoother(0.1)
    model, x = build("Llama", "ForCausalLM"), tokens()
    alone, batch = twin(model), transformers.DataCollatorWithFlattening()(features(x, x))
    ours = smooth(attend(model)(**batch), batch["labels"], shift_labels=True)
    losses = [smooth(alone(row[None]), row[None], shift_labels=True) * (len(row) - 1) for row in x if len(row) > 1]
    assert_close(ours, torch.stack(losses).sum() / (len(x.values) - len(x)), **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_the_packed_form_in_graphs(family: str):
    model = attend(build(family, "ForCausalLM"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ((7, 1, 12, 3), (2, 5), (9, 9, 3, 4, 20), (4, 4, 4)):
        batch = collator()(features(*[tokens(lengths)] * 2))
        assert_close(compiled(**batch).loss, model(**batch).loss, **TOLERANCE)
    assert counter.frame_count == 2  # plain tensors, whose sizes torch makes dynamic once they change


def test_the_packed_form_with_a_head_of_rows():
    model = build("Llama", "ForSequenceClassification")
    alone, x = twin(model), tokens()
    labels = labels_for("ForSequenceClassification", x)
    offsets = torch.tensor([0, *x.lengths.cumsum(0).tolist()], dtype=torch.int32)
    out = attend(model)(input_ids=x.values[None], cu_seq_lens_q=offsets, labels=labels)
    assert_close(out.loss, loss_alone(alone, "ForSequenceClassification", x, labels), **TOLERANCE)


def test_positions_that_begin_elsewhere():
    x = tokens()
    batch = collator()(features(x, x))
    with pytest.raises(tdc.ShapeError, match=r"position_ids that begin with 2 in each row, got others"):
        attend(build("Roberta", "ForMaskedLM"))(**batch)


def test_tokens_that_are_not_packed():
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(tdc.ShapeError, match=r"tokens \(1, N\) beside cu_seq_lens_q"):
        attend(build("Bert", "Model"))(input_ids=torch.ones(2, 3).long(), cu_seq_lens_q=offsets)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
        self.rows = [torch.randint(3, 50, (n,), generator=generator).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """What a collator with padding gives."""
    x = tdc.from_list([row["input_ids"] for row in rows])
    return tdc.interop.to_hf(tdc.TensorDict({"input_ids": x, "labels": x}, [len(x)]), pad={"labels": -100})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer(tmp_path: Path, compiled: bool):
    model = build("Llama", "ForCausalLM")
    alone = twin(model)
    options: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "learning_rate": 0.01, "eval_strategy": "no", "disable_tqdm": True, "optim": "sgd",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    ours = transformers.TrainingArguments(**options, torch_compile=compiled, torch_compile_backend="aot_eager")
    data = Rows(16)
    first = transformers.Trainer(attend(model), ours, collator(), train_dataset=data, eval_dataset=data)
    first.train()
    second = transformers.Trainer(
        alone, transformers.TrainingArguments(**options), padded, train_dataset=data, eval_dataset=data
    )
    second.train()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(a, b, **TOLERANCE)
    assert first.evaluate()["eval_loss"] == pytest.approx(second.evaluate()["eval_loss"], rel=0.1)


class SourcesAndTargets(Rows):
    """Sources, and targets of other lengths."""

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[i], "labels": self.rows[-1 - i]}


def packed_rows(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    return {name: tdc.from_list([row[name] for row in rows]) for name in rows[0]}


def padded_rows(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    batch = packed_rows(rows)
    mask = tdc.interop.to_hf(batch["input_ids"])["attention_mask"]
    return {name: x.to_padded(-100 if name == "labels" else 0).data for name, x in batch.items()} | {
        "attention_mask": mask
    }


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_trainer_of_encoder_and_decoder(tmp_path: Path, family: str):
    model = build_encoder_decoder(family)
    alone, data = twin(model), SourcesAndTargets(16)
    options: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "learning_rate": 0.01, "disable_tqdm": True, "optim": "sgd",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    losses = []
    for one, collate in ((attend(model), packed_rows), (alone, padded_rows)):
        settings = transformers.Seq2SeqTrainingArguments(**options)
        trainer = transformers.Seq2SeqTrainer(one, settings, collate, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(a, b, **TOLERANCE)
