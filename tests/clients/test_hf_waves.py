"""Models of transformers that begin with convolutions, on waves of different lengths: each row as it is alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from harness import Counter
from torch.testing import assert_close

import tdc

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.clients
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
NORMS = {"group": {"feat_extract_norm": "group"}, "layer": {"feat_extract_norm": "layer", "do_stable_layer_norm": True}}


def made(name: str, kind: str = "Model", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, name + kind)(config).eval()


def waves(lengths: tuple[int, ...] = (400, 730, 300)) -> Any:
    torch.manual_seed(1)
    return tdc.pack([torch.randn(n) for n in lengths])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
def test_each_row_is_as_it_is_alone(name: str, norm: str):
    model = made(name, **NORMS[norm])
    alone, model, x = deepcopy(model), tdc.hf.attend(model), waves()
    leaf: Any = x.requires_grad_()
    out = model(input_values=leaf).last_hidden_state
    out.square().sum().backward()
    for y, row, grad in zip(out.unbind(), x.detach().unbind(), leaf.grad.unbind(), strict=True):
        own = row.clone().requires_grad_()
        want = alone(own[None]).last_hidden_state[0]
        assert_close(y, want, rtol=1e-4, atol=1e-5)
        want.square().sum().backward()
        assert_close(grad, own.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")  # of torch, to a function of transformers
def test_a_head_of_letters_trains_in_one_graph():
    model = tdc.hf.attend(made("Wav2Vec2", "ForCTC", vocab_size=7))
    ctc_loss: Any = torch.nn.functional.ctc_loss

    def loss(x: Any, texts: Any) -> Any:
        return ctc_loss(model(input_values=x).logits.log_softmax(-1), texts, None, None)

    counter = Counter()
    graph = torch.compile(loss, fullgraph=True, backend=counter)
    texts = tdc.pack([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6])])
    for lengths in ((400, 730, 300), (500, 320, 900)):
        x = waves(lengths)
        found, want = graph(x, texts), loss(x, texts)
        assert_close(found, want, rtol=1e-5, atol=1e-5)
        weight = model.lm_head.weight
        assert_close(*[torch.autograd.grad(value, weight)[0] for value in (found, want)], rtol=1e-4, atol=1e-5)
    assert counter.graphs == 1


def test_a_row_has_one_class_and_dense_calls_stay():
    model = made("Wav2Vec2", "ForSequenceClassification", num_labels=3)
    alone, x = deepcopy(model), waves()
    want = torch.cat([alone(row[None]).logits for row in x.unbind()])
    out = tdc.hf.attend(model)(input_values=x, labels=torch.tensor([0, 1, 2]))
    assert_close(out.logits, want, rtol=1e-4, atol=1e-5)
    assert out.loss.ndim == 0
    row = x[0][None]
    assert_close(model(row).logits, alone(row).logits)


def test_what_is_refused():
    model = tdc.hf.attend(made("Wav2Vec2", "ForCTC", vocab_size=7))
    for name in ("attention_mask", "labels"):
        with pytest.raises(tdc.UnsupportedError, match=f"without {name}"):
            model(input_values=waves(), **{name: waves()})
    model.config.apply_spec_augment = True
    with pytest.raises(tdc.UnsupportedError, match="apply_spec_augment = False"):
        model.train()(input_values=waves())
    with pytest.raises(tdc.UnsupportedError, match="WavLMModel"):
        tdc.hf.attend(made("WavLM"))
