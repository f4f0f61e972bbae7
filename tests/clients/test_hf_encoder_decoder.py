"""Models of encoder and decoder on ragged batches: each target sees itself and its own source, as if it were alone."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc
from tdc import NestedTensor

transformers: Any = pytest.importorskip("transformers")

from hf_encoder_decoder import (  # noqa: E402 - behind the skip
    CONDITIONAL,
    FAMILIES,
    T5,
    TARGETS,
    batch_of,
    build_encoder_decoder,
    loss_of_rows,
    rows_of,
    sources_of,
)
from hf_models import LENGTHS, tokens, twin  # noqa: E402 - behind the skip
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - behind the skip

from tdc.hf import attend, generate  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
OF_TOKENS = [family for family in FAMILIES if family != "Whisper"]


def assert_rows(out: Any, expected: list[Any]) -> None:
    """Each output of a batch is that of its rows."""
    for name in [name for name in out if name != "loss"]:
        ours = out[name] if isinstance(out[name], tuple) else (out[name],)
        for i, one in enumerate(expected):
            theirs = one[name] if isinstance(one[name], tuple) else (one[name],)
            for a, b in zip(ours, theirs, strict=True):
                assert_close(a[i], b[0], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["Model", CONDITIONAL])
def test_outputs_are_those_of_each_row_alone(family: str, head: str):
    model = build_encoder_decoder(family, head)
    alone = twin(model)
    batch = {**sources_of(family), "decoder_input_ids": tokens(TARGETS)}
    out = attend(model)(**batch, output_hidden_states=True)
    assert isinstance(out.encoder_last_hidden_state, torch.Tensor if family == "Whisper" else NestedTensor)
    assert len(out.encoder_hidden_states) == len(out.decoder_hidden_states) == 3
    assert_rows(out, [alone(**row, output_hidden_states=True) for row in rows_of(batch)])


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_rows(family: str):
    model = build_encoder_decoder(family).train()
    alone, batch = twin(model), batch_of(family)
    out = attend(model)(**batch)
    expected = loss_of_rows(alone, batch)
    assert_close(out.loss, expected, **TOLERANCE)
    assert_rows(out, [alone(**row) for row in rows_of(batch)])
    out.loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert_close(ours.grad, theirs.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


FAST = ("Bart", "T5", "Whisper")


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in FAST else [pytest.mark.slow]) for f in FAMILIES])
def test_one_graph_for_all_lengths(family: str):
    model = attend(build_encoder_decoder(family)).train()
    used = [p for p in model.parameters() if p.requires_grad]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths, targets in ((LENGTHS, TARGETS), ((2, 5), (4, 2)), ((9, 9, 3, 4, 15), (2, 15, 3, 3, 8))):
        td = tdc.TensorDict(batch_of(family, lengths, targets), [len(lengths)])
        ours, eager = compiled(td), model(td)
        assert_close(ours.loss, eager.loss, **TOLERANCE)
        gradients = [torch.autograd.grad(out.loss, used) for out in (ours, eager)]
        for a, b in zip(*gradients, strict=True):
            assert_close(a, b, **TOLERANCE)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["T5", "M2M100"])
def test_kernels_of_inductor(family: str):
    """T5's bias learns, and lies otherwise in memory than it is read; M2M100's positions are padded on the way."""
    model = attend(build_encoder_decoder(family)).train()
    used = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(model, fullgraph=True)
    for lengths, targets in ((LENGTHS, TARGETS), ((9, 9, 3, 4, 15), (2, 15, 3, 3, 8))):
        batch = batch_of(family, lengths, targets)
        gradients = [torch.autograd.grad(one(**batch).loss, used) for one in (compiled, model)]
        for a, b in zip(*gradients, strict=True):
            assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("family", OF_TOKENS)
def test_other_arguments(family: str):
    """Vectors in place of tokens on both sides, positional arguments, and targets beside labels."""
    model = build_encoder_decoder(family)
    alone, batch = twin(model), {"input_ids": tokens(LENGTHS), "decoder_input_ids": tokens(TARGETS)}
    batch["labels"] = batch["decoder_input_ids"].with_values(torch.randint(3, 50, (sum(TARGETS),)))
    out = attend(model)(**batch)
    assert_rows(out, [alone(**row) for row in rows_of(batch)])
    assert_close(out.loss, loss_of_rows(alone, batch), **TOLERANCE)
    positional = model(batch["input_ids"], labels=batch["labels"], decoder_input_ids=batch["decoder_input_ids"])
    assert_close(positional.loss, out.loss)
    vectors = {
        "inputs_embeds": tdc.pack([torch.randn(n, 16) for n in LENGTHS]),
        "decoder_inputs_embeds": tdc.pack([torch.randn(n, 16) for n in TARGETS]),
    }
    assert_rows(model(**vectors), [alone(**row) for row in rows_of(vectors)])


def test_positions_that_are_given():
    """Whisper takes those of targets."""
    model = build_encoder_decoder("Whisper")
    alone, batch = twin(model), {**sources_of("Whisper"), "decoder_input_ids": tokens(TARGETS)}
    batch["decoder_position_ids"] = batch["decoder_input_ids"].with_values(torch.randint(0, 16, (sum(TARGETS),)))
    assert_rows(attend(model)(**batch), [alone(**row) for row in rows_of(batch)])


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_as_many_tokens_as_their_sources(family: str):
    """Both sides have equal totals, and other rows."""
    model = build_encoder_decoder(family)
    alone, batch = twin(model), batch_of(family, (2, 6, 4), (6, 2, 4))
    assert_rows(attend(model)(**batch), [alone(**row) for row in rows_of(batch)])


@pytest.mark.parametrize("family", ["T5", "MT5"])
def test_a_bias_of_distances_is_as_large_as_the_longest_rows(family: str, monkeypatch: pytest.MonkeyPatch):
    FAMILIES.setdefault("MT5", T5)
    model, batch = attend(build_encoder_decoder(family)), batch_of(family)
    sizes: list[tuple[int, int]] = []
    for module in [m for m in model.modules() if hasattr(m, "compute_bias")]:
        compute = module.compute_bias
        monkeypatch.setattr(module, "compute_bias", lambda q, k, f=compute, **o: sizes.append((q, k)) or f(q, k, **o))
    model(**batch)
    assert sizes == [(max(LENGTHS), max(LENGTHS)), (max(TARGETS), max(TARGETS))]


@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_an_encoder_by_itself(family: str):
    model, x = build_encoder_decoder(family, "EncoderModel"), tokens()
    alone = twin(model)
    out = attend(model)(input_ids=x)
    assert_rows(out, [alone(input_ids=row[None]) for row in x])


def test_classes_of_tokens_of_an_encoder():
    model = build_encoder_decoder("T5", "ForTokenClassification", classifier_dropout=0.0)
    alone, x = twin(model), tokens()
    labels = x.with_values(torch.arange(len(x.values)) % 2)
    out = attend(model)(input_ids=x, labels=labels)
    assert_rows(out, [alone(input_ids=row[None]) for row in x])
    losses = [alone(input_ids=a[None], labels=b[None]).loss * len(a) for a, b in zip(x, labels, strict=True)]
    assert_close(out.loss, torch.stack(losses).sum() / len(x.values), **TOLERANCE)


@pytest.mark.parametrize("family", OF_TOKENS)
def test_padded_calls_are_as_before(family: str):
    model, batch = build_encoder_decoder(family), batch_of(family)
    alone = twin(model)
    padded = tdc.interop.to_hf(batch["input_ids"], pad=model.config.pad_token_id)
    padded.pop("position_ids")
    padded["labels"] = batch["labels"].to_padded(-100).data
    ragged = attend(model)(**batch)
    out = model(**padded)
    assert_close(out.logits, alone(**padded).logits, **TOLERANCE)
    assert_close(out.loss, ragged.loss, **TOLERANCE)
    assert_close(model(**rows_of(batch)[0]).logits, alone(**rows_of(batch)[0]).logits, **TOLERANCE)


@pytest.mark.parametrize("family", ["Bart", "T5", "Whisper"])
@pytest.mark.parametrize(
    ("sources", "targets"), [((5,), (3,)), ((1,), (1,)), ((3, 2, 4), (2, 0, 1)), ((3, 0, 2), (2, 4, 1))]
)
def test_one_row_and_empty_rows(family: str, sources: tuple[int, ...], targets: tuple[int, ...]):
    model = build_encoder_decoder(family)
    alone, batch = twin(model), {**sources_of(family, sources), "decoder_input_ids": tokens(targets)}
    out = attend(model)(**batch)
    assert out.logits.lengths.tolist() == list(targets)
    assert torch.isfinite(out.logits.values).all()
    for i, row in enumerate(rows_of(batch)):
        if sources[i] and targets[i]:
            assert_close(out.logits[i], alone(**row).logits[0], **TOLERANCE)


def test_without_the_check():
    model, batch = build_encoder_decoder("T5"), batch_of("T5")
    expected = attend(copy.deepcopy(model))(**batch).loss
    assert_close(attend(model, check=False)(**batch).loss, expected)


def test_whisper_generates_as_before():
    model, features = build_encoder_decoder("Whisper", suppress_tokens=None), sources_of("Whisper")["input_features"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "begin_suppress_tokens": None}
    expected = twin(model).generate(features, **options)
    assert torch.equal(attend(model).generate(features, **options), expected)


def test_calls_of_several_threads():
    """Each counts positions in its own rows."""
    model = attend(build_encoder_decoder("Bart"))
    batches = [batch_of("Bart", (3 + i, 2), (1 + i, 4)) for i in range(8)]
    expected = [model(**batch).loss for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for ours, theirs in zip(pool.map(lambda b: model(**b).loss, batches), expected, strict=True):
                assert_close(ours, theirs)


def test_a_call_that_fails_leaves_nothing_behind():
    model, batch = attend(build_encoder_decoder("Bart")), batch_of("Bart")
    expected = model(**batch).logits
    wrong = tokens((2, 3)).with_values(torch.full((5,), 1000))
    with pytest.raises(IndexError):
        model(input_ids=tokens((2, 3)), decoder_input_ids=wrong)
    one = rows_of(batch)[2]
    assert_close(model(**one).logits[0], expected[2], **TOLERANCE)


@pytest.mark.parametrize("family", OF_TOKENS)
@pytest.mark.parametrize("attended", [False, True])
def test_generated_tokens_are_those_of_each_source_alone(family: str, attended: bool):
    model, x = build_encoder_decoder(family), tokens()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [2, *range(10, 14)]}
    expected = [model.generate(row[None], attention_mask=torch.ones(1, len(row)), **options)[0, 1:] for row in x]
    new = generate(attend(model) if attended else model, x, **options)
    assert new.tolist() == [found.tolist() for found in expected]


def test_several_of_each_source():
    options = {"max_new_tokens": 4, "num_beams": 2, "num_return_sequences": 2, "eos_token_id": None}
    new = generate(build_encoder_decoder("T5"), tokens((3, 5)), **options)
    assert new.lengths.tolist() == [4] * 4
