"""Rotary frequencies that follow the length of a call: each row has those that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc

transformers: Any = pytest.importorskip("transformers")

from hf_models import DECODER, refused, tokens, twin, with_large_weights  # noqa: E402 - behind the skip
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - behind the skip

from tdc.hf import attend  # noqa: E402 - behind the skip

pytestmark = pytest.mark.clients
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CONTEXT = 8
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "rope_theta": 10000.0,
    "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
MODELS = {
    "Phi3": (LONG, 64), "Phimoe": ({**LONG, "long_mscale": 1.3, "short_mscale": 0.9}, 64), "Llama": (DYNAMIC, CONTEXT),
}  # fmt: skip
LENGTHS = (12, 3, 8, 9, 1, 20)  # on both sides of the context


def build_rotary(family: str, **options: Any) -> Any:
    rope, positions = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**DECODER, "max_position_embeddings": positions, "rope_parameters": rope, **options}
    )
    return with_large_weights(getattr(transformers, f"{family}ForCausalLM")(config))


@pytest.mark.parametrize("family", MODELS)
def test_each_row_has_the_frequencies_of_its_length(family: str):
    model, x = build_rotary(family), tokens(LENGTHS)
    alone = twin(model)  # it remembers the longest row until a short one comes
    expected = [alone(input_ids=row[None]).logits[0] for row in x]
    for _ in range(2):
        for ours, theirs in zip(attend(model)(input_ids=x).logits, expected, strict=True):
            assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("family", MODELS)
def test_positions_that_are_given(family: str):
    model, x = build_rotary(family), tokens((5, 3, 4))
    alone, places = twin(model), x.with_values(torch.arange(12) % 9 * 2)
    out = attend(model)(input_ids=x, position_ids=places).logits
    for i, row in enumerate(x):
        assert_close(out[i], alone(input_ids=row[None], position_ids=places[i][None]).logits[0], **TOLERANCE)


@pytest.mark.parametrize("family", MODELS)
def test_empty_rows_and_padded_calls(family: str):
    model, x = build_rotary(family), tokens((0, 12, 0, 3))
    alone = twin(model)
    assert_close(attend(model)(input_ids=x).logits[1], alone(x[1][None]).logits[0], **TOLERANCE)
    padded = tdc.interop.to_hf(tokens((12, 3)))
    real = padded["attention_mask"].bool()
    assert_close(model(**padded).logits[real], alone(**padded).logits[real], **TOLERANCE)


def test_one_graph_for_all_lengths():
    model = attend(build_rotary("Phi3"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, (2, 5), (4, 4, 30)):
        x = tokens(lengths)
        assert_close(compiled(input_ids=x).logits.values, model(input_ids=x).logits.values, **TOLERANCE)
    assert counter.frame_count == 1


def test_the_check_goes_beyond_the_context():
    """A layer that sees the length of a call, but not that of a few short rows."""
    model = build_rotary("Phi3", rope_parameters={**LONG, "original_max_position_embeddings": 32})
    layer = model.model.layers[0].mlp.register_forward_hook(lambda layer, args, out: out * (1 + (out.shape[1] > 33)))
    refused(lambda: attend(model), "Phi3ForCausalLM, which sees other rows")
    layer.remove()
    attend(model)
