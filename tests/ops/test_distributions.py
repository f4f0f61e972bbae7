"""torch.distributions: of packed values each example is as if it were alone; of containers they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc

X = tdc.pack([torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 4)])
ACTIONS = X.argmax(-1)
MAKES: dict[str, Any] = {
    "Categorical": lambda x, **options: torch.distributions.Categorical(logits=x, **options),
    "Normal": lambda x, **options: torch.distributions.Normal(x, 1.0, **options),
    "Bernoulli": lambda x, **options: torch.distributions.Bernoulli(logits=x, **options),
    "Beta": lambda x, **options: torch.distributions.Beta(x.exp(), x.exp() + 1, **options),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_distributions_of_containers_say_what_to_write(name: str, padded: bool):
    """Their checks take nothing but tensors. The first torch.compile of a process turns them off."""
    text = r"^tdc.distributions: .*\nhint: tdc.ops.distribution\(Normal, x, 1.0\)"
    with pytest.raises(tdc.UnsupportedError, match=text):
        MAKES[name](X.to_padded() if padded else X, validate_args=True)


@pytest.mark.parametrize("name", MAKES)
def test_distributions_of_packed_values(name: str):
    d = MAKES[name](X.values)
    sample = X.with_values(d.sample())
    scores, entropy = X.with_values(d.log_prob(sample.values)), X.with_values(d.entropy())
    for n, row in enumerate(X):
        alone = MAKES[name](row)
        assert_close(scores[n], alone.log_prob(sample[n]))
        assert_close(entropy[n], alone.entropy())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_without_their_checks_densities_are_those_of_each_example(name: str, padded: bool):
    samples = X.with_values(MAKES[name](X.values).sample()) if name != "Categorical" else ACTIONS
    x, samples = (X.to_padded(), samples.to_padded()) if padded else (X, samples)
    d = MAKES[name](x, validate_args=False)
    scores, entropy = d.log_prob(samples), d.entropy()
    assert type(scores) is type(entropy) is type(x)
    for n, row in enumerate(X):
        alone = MAKES[name](row)
        assert_close(scores[n], alone.log_prob(samples[n]))
        assert_close(entropy[n], alone.entropy())


@pytest.mark.parametrize("name", ["Categorical", "Normal", "Beta"])
def test_without_their_checks_samples_are_refused(name: str):
    with pytest.raises(tdc.TdcError):
        MAKES[name](X, validate_args=False).sample()


def test_ndimension_is_dim():
    td = tdc.TensorDict({"x": X}, [3])
    assert [x.ndimension() for x in (X, X.to_padded(), td)] == [x.dim() for x in (X, X.to_padded(), td)] == [3, 3, 1]
