"""torch.distributions: of packed values each example is as if it were alone; of containers they say so."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import tdc

X = tdc.pack([torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 4)])
MAKES = {
    "Categorical": lambda x: torch.distributions.Categorical(logits=x),
    "Normal": lambda x: torch.distributions.Normal(x, 1.0),
    "Bernoulli": lambda x: torch.distributions.Bernoulli(logits=x),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_distributions_of_containers_say_what_to_write(name: str, padded: bool):
    """Their log_prob takes nothing but tensors."""
    with pytest.raises(tdc.UnsupportedError, match=r"hint: in torch.distributions .* Normal\(x.values, 1.0\)"):
        MAKES[name](X.to_padded() if padded else X)


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
def test_without_their_checks_they_have_densities_and_no_samples(padded: bool):
    d = torch.distributions.Normal(X.to_padded() if padded else X, 1.0, validate_args=False)
    assert_close(d.log_prob(d.mean + 1)[0], torch.distributions.Normal(X[0], 1.0).log_prob(X[0] + 1))
    with pytest.raises(tdc.UnsupportedError, match="normal"):
        d.sample()


def test_ndimension_is_dim():
    td = tdc.TensorDict({"x": X}, [3])
    assert [x.ndimension() for x in (X, X.to_padded(), td)] == [x.dim() for x in (X, X.to_padded(), td)] == [3, 3, 1]
