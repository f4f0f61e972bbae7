"""Models of transformers on ragged batches: outputs, losses and gradients are those of each row alone, in one graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc
from tdc import NestedTensor

transformers = pytest.importorskip("transformers")

from hf_encoder_decoder import FAMILIES, batch_of, build_encoder_decoder, rows_of  # noqa: E402 - behind the skip
from hf_models import CASES, LENGTHS, LOSSES, build, labels_for, loss_alone, tokens, twin  # noqa: E402 - behind the skip
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - behind the skip

from tdc.hf import attend  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def names(cases: list[tuple[str, str]]) -> list[str]:
    return [family + head for family, head in cases]


@pytest.mark.parametrize(("family", "head"), CASES, ids=names(CASES))
def test_outputs_are_those_of_each_row_alone(family: str, head: str):
    model = build(family, head)
    alone, x = twin(model), tokens()
    out = attend(model)(input_ids=x, output_hidden_states=True)
    checked = 0
    for i, row in enumerate(x):
        one = alone(input_ids=row[None], output_hidden_states=True)
        for key in [k for k in out if k not in ("hidden_states", "loss")]:
            assert_close(out[key][i], one[key][0], **TOLERANCE)
            checked += 1
        for ours, theirs in zip(out.hidden_states, one.hidden_states, strict=True):
            assert isinstance(ours, NestedTensor)
            assert_close(ours[i], theirs[0], **TOLERANCE)
    assert checked >= len(x)


@pytest.mark.parametrize(("family", "head"), LOSSES, ids=names(LOSSES))
def test_loss_and_gradients_are_those_of_the_rows(family: str, head: str):
    model = build(family, head).train()
    alone, x = twin(model), tokens()
    labels = labels_for(head, x)
    loss = attend(model)(input_ids=x, labels=labels).loss
    expected = loss_alone(alone, head, x, labels)
    assert_close(loss, expected, **TOLERANCE)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        else:
            assert_close(ours.grad, theirs.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


COMPILED = [c for c in LOSSES if c[1] not in ("LMHeadModel", "ForTokenClassification") or c[0] == "GPT2"]
FAST = ("BertForMaskedLM", "LlamaForCausalLM", "BertForSequenceClassification")


@pytest.mark.parametrize(
    ("family", "head"),
    [pytest.param(*c, marks=[] if "".join(c) in FAST else [pytest.mark.slow], id="".join(c)) for c in COMPILED],
)
def test_one_graph_for_all_lengths(family: str, head: str):
    model = attend(build(family, head)).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, (2, 5), (9, 9, 3, 4, 20)):
        x = tokens(lengths)
        td = tdc.TensorDict({"input_ids": x, "labels": labels_for(head, x)}, [len(x)])
        ours, eager = compiled(td), model(td)
        assert_close(ours.loss, eager.loss, **TOLERANCE)
        for a, b in zip(torch.autograd.grad(ours.loss, [*used(model)]), grads(eager.loss, model), strict=True):
            assert_close(a, b, **TOLERANCE)
    assert counter.frame_count == 1


def used(model: Any) -> list[torch.Tensor]:
    """Weights that the loss depends on: all but those of a pooler whose result is not asked for."""
    return [p for n, p in model.named_parameters() if "pooler" not in n or "Sequence" in type(model).__name__]


def grads(loss: torch.Tensor, model: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, used(model))


def test_hidden_states_of_some_layers():
    model, x = attend(build("Bert", "Model")), tokens()
    every = model(x, output_hidden_states=True).hidden_states
    first, left_out, last = model(x, output_hidden_states=[0, -1]).hidden_states
    assert left_out is None
    assert torch.equal(first.values, every[0].values)
    assert torch.equal(last.values, every[2].values)


def test_entries_of_a_tokenizer():
    model = build("Bert", "Model")
    alone, x = twin(model), tokens()
    kinds = x.with_values(torch.arange(x.values.shape[0]) % 2)
    places = x.with_values(torch.arange(x.values.shape[0]) + 2)
    out = attend(model)(input_ids=x, token_type_ids=kinds, position_ids=places).last_hidden_state
    for i, row in enumerate(x):
        one = alone(row[None], token_type_ids=kinds[i][None], position_ids=places[i][None]).last_hidden_state
        assert_close(out[i], one[0], **TOLERANCE)
    batch = tdc.TensorDict({"input_ids": x, "token_type_ids": kinds}, [len(x)])
    assert_close(model(batch).pooler_output, model(**batch).pooler_output)
    assert_close(model(x).pooler_output, model(input_ids=x).pooler_output)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_vectors_in_place_of_tokens(family: str, head: str):
    model = build(family, head)
    alone, x = twin(model), tdc.pack([torch.randn(n, 16) for n in LENGTHS])
    if (family, head) == ("Llama", "ForSequenceClassification"):  # which would take the last position of the rectangle
        with pytest.raises(tdc.UnsupportedError, match="expected input_ids for this head, got inputs_embeds"):
            attend(model)(inputs_embeds=x)
        return
    out = attend(model)(inputs_embeds=x)[0]
    for i, row in enumerate(x):
        assert_close(out[i], alone(inputs_embeds=row[None])[0][0], **TOLERANCE)


@pytest.mark.parametrize("family", ["Bert", "GPT2", "Gemma2", "Mistral"])
def test_padded_calls_are_as_before(family: str):
    model = build(family, "Model")
    alone, x = twin(model), tokens()
    padded = tdc.interop.to_hf(x)
    before = alone(**padded).last_hidden_state
    real = padded["attention_mask"].bool()
    assert_close(attend(model)(**padded).last_hidden_state[real], before[real], **TOLERANCE)
    assert_close(model(x[0][None]).last_hidden_state, alone(x[0][None]).last_hidden_state, **TOLERANCE)


def test_generate_is_as_before():
    model = build("Llama", "ForCausalLM")
    alone = twin(model)
    padded = tdc.interop.to_hf(tokens(), side="left")
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(attend(model).generate(**padded, **options), alone.generate(**padded, **options))


@pytest.mark.parametrize("lengths", [(5,), (1,), (0, 3, 0, 2)])
def test_one_row_and_empty_rows(lengths: tuple[int, ...]):
    model = build("Llama", "ForCausalLM")
    alone, x = twin(model), tokens(lengths)
    out = attend(model)(input_ids=x, labels=x)
    for i, row in enumerate(x):
        if len(row):
            assert_close(out.logits[i], alone(row[None]).logits[0], **TOLERANCE)
    if sum(lengths) > len(lengths):
        assert_close(out.loss, loss_alone(alone, "ForCausalLM", tokens(lengths).with_values(x.values), x), **TOLERANCE)


# -- with a decoder beside the encoder, too

HEADS = {"Bert": "ForMaskedLM", "Llama": "ForCausalLM"}


def made(family: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model with a loss, and a batch."""
    if family not in HEADS:
        return build_encoder_decoder(family, **options), batch_of(family)
    x = tokens()
    return build(family, HEADS[family], **options), {"input_ids": x, "labels": x}


@pytest.mark.parametrize("family", [*HEADS, *FAMILIES])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_layers(family: str, reentrant: bool):
    model, batch = made(family)
    leaves = [p for p in attend(model).train().parameters() if p.requires_grad]
    expected = torch.autograd.grad(model(**batch).loss, leaves)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model(**batch).loss.backward()
    for p, theirs in zip(leaves, expected, strict=True):
        assert_close(p.grad, theirs, **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Bart", "T5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(family: str, dtype: torch.dtype):
    model, batch = made(family)
    alone = twin(model.to(dtype))
    logits = attend(model)(**batch).logits
    assert logits.dtype == dtype
    close = TOLERANCE if dtype == torch.float64 else {"rtol": 1e-1, "atol": 1e-1}
    for i, row in enumerate(rows_of(batch)):
        assert_close(logits[i], alone(**row).logits[0], **close)


@pytest.mark.parametrize("family", ["Bert", "Bart", "T5", "Whisper"])
def test_autocast(family: str):
    model, batch = made(family)
    expected = attend(model)(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    assert not torch.equal(loss, expected)
    assert_close(loss, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("family", "name"),
    [("Bert", "attention_probs_dropout_prob"), ("Bart", "attention_dropout"), ("T5", "dropout_rate")],
)
def test_dropout_is_on_in_training_only(family: str, name: str):
    model, batch = made(family, **{name: 0.5})
    torch.manual_seed(1)
    first = attend(model)(**batch).loss
    assert torch.equal(first, model(**batch).loss)
    model.train()
    assert not torch.equal(first, model(**batch).loss)


@pytest.mark.parametrize("family", ["Bert", "Bart"])
def test_a_copy_is_a_model_of_its_own(family: str):
    model, batch = made(family)
    expected, other = attend(model)(**batch).logits, copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert_close(other(**batch).logits.values, expected.values)
    assert not torch.equal(model(**batch).logits.values, expected.values)


@pytest.mark.parametrize("family", ["Bert", "Bart", "M2M100"])
def test_it_is_done_once(family: str):
    model, batch = made(family)
    alone = twin(model)
    attend(model.base_model)
    out = attend(attend(model))(**batch)
    for i, row in enumerate(rows_of(batch)):
        assert_close(out.logits[i], alone(**row).logits[0], **TOLERANCE)
    model.set_attn_implementation("sdpa")
    with pytest.raises(tdc.UnsupportedError, match="once more"):
        model(**batch)
    assert_close(attend(model)(**batch).loss, out.loss)
