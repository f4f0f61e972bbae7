"""TokenBudgetSampler and BucketSampler: every example once, full batches, near lengths, ranks, states, wrong input."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tdc
from tdc import DtypeError, KeyPathError, ShapeError, StructureError
from tdc.data import BucketSampler, TokenBudgetSampler

KINDS: dict[str, Callable[..., Any]] = {
    "tokens": lambda lengths, **kw: TokenBudgetSampler(lengths, 64, **kw),
    "buckets": lambda lengths, **kw: BucketSampler(lengths, 5, window=4, **kw),
}
both = pytest.mark.parametrize("make", KINDS.values(), ids=list(KINDS))


def random_lengths(n: int, seed: int = 0, most: int = 40) -> list[int]:
    return torch.randint(0, most, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(batch: list[int], lengths: Any) -> int:
    return sum(int(lengths[i]) for i in batch)


# -- the budget


def lognormal(mean: float, longest: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: (torch.randn(10_000, generator=g) + math.log(mean)).exp().clamp(1, longest).long()


def uniform(shortest: int, longest: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(shortest, longest, (10_000,), generator=g)


def cut_documents(g: torch.Generator) -> Tensor:
    found = lognormal(300, 2048)(g)
    return found.where(torch.rand(10_000, generator=g) > 0.3, found.new_tensor(2048))


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        (lognormal(400, 2048), 16_384), (lognormal(400, 2048), 8192), (lognormal(400, 2048), 4096),
        (lognormal(30, 512), 4096), (uniform(1, 200), 4096), (uniform(1, 200), 1024), (uniform(100, 200), 2048),
        (cut_documents, 8192), (cut_documents, 16_384),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_fill_the_budget(lengths: Callable[[torch.Generator], Tensor], budget: int, seed: int):
    found = lengths(torch.Generator().manual_seed(seed))
    batches = list(TokenBudgetSampler(found, budget, seed=seed))
    fill = [tokens(batch, found) / budget for batch in batches]
    assert sorted(chain(*batches)) == list(range(10_000))
    assert max(fill) <= 1
    assert min(fill[:-1]) >= (0.98 if found.min() < budget / 100 else 0.96)  # a gap cannot be smaller than examples
    assert sum(fill[:-1]) / len(fill[:-1]) >= 0.999
    assert len(batches) - sum(fill) < 2


def test_batches_are_a_mixture():
    """The lengths of a batch are those of all examples, also late in an epoch."""
    found = lognormal(400, 2048)(torch.Generator().manual_seed(0))
    batches = list(TokenBudgetSampler(found, 16_384))[:-1]
    means = torch.tensor([tokens(batch, found) / len(batch) for batch in batches])
    assert float(means.std() / means.mean()) < 0.15
    late = means[-len(means) // 10 :].mean() / means.mean()
    assert 0.95 < float(late) < 1.05


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=120), st.integers(20, 60), st.booleans(), st.integers(0, 3))
def test_every_example_is_in_one_batch(lengths: list[int], budget: int, shuffle: bool, seed: int):
    batches = list(TokenBudgetSampler(lengths, budget, shuffle=shuffle, seed=seed))
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    assert all(batch and tokens(batch, lengths) <= budget for batch in batches)
    if not shuffle:
        assert list(chain(*batches)) == list(range(len(lengths)))
        for a, b in pairwise(batches):
            assert tokens(a, lengths) + lengths[b[0]] > budget


def test_too_long_examples_are_named():
    with pytest.raises(ShapeError) as caught:
        TokenBudgetSampler([3, 9, 2, 11], 8)
    assert str(caught.value) == (
        "tdc.data.TokenBudgetSampler: expected examples of at most max_tokens=8 tokens, got 2 that are longer\n"
        "at example 1: 9 tokens\nat example 3: 11 tokens\n"
        "hint: max_tokens=11 or more, tdc.truncate(x, lengths), or leave them out: td[lengths <= n]"
    )
    with pytest.raises(ShapeError) as caught:
        TokenBudgetSampler([9] * 1000, 8)
    assert "got 1000 that are longer" in str(caught.value)
    assert str(caught.value).count("\n") == 9


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [([4, 4, 4, 4], 2), ([4, 4, 4], 1), ([0, 9, 9], 2), ([4, 5, 0, 4], 1), ([4], 0), ([0, 0], 0), ([], 0)],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_what_is_not_full(lengths: list[int], kept: int, shuffle: bool):
    sampler = TokenBudgetSampler(lengths, 9, shuffle=shuffle, drop_last=True)
    assert (len(sampler), len(list(sampler))) == (kept, kept)


# -- buckets


def padding(batches: list[list[int]], lengths: list[int]) -> float:
    real = sum(tokens(batch, lengths) for batch in batches)
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches) / real


def test_buckets_have_little_padding():
    lengths = lognormal(400, 2048)(torch.Generator().manual_seed(0)).tolist()
    bucketed, random = (padding(list(BucketSampler(lengths, 16, window=w)), lengths) for w in (100, 1))
    assert bucketed < 1.05
    assert random > 2
    batches = list(BucketSampler(lengths, 16))
    assert [len(batch) for batch in batches] == [16] * 625
    means = torch.tensor([tokens(batch, lengths) / 16 for batch in batches])
    early, late = means[:300].mean(), means[300:].mean()  # batches are shuffled
    assert 0.8 < float(early / late) < 1.25


def test_the_batches_of_a_round_of_ranks_are_near():
    lengths = lognormal(400, 2048)(torch.Generator().manual_seed(0)).tolist()
    ranks = [list(BucketSampler(lengths, 16, rank=r, world_size=4)) for r in range(4)]
    longest = [[max(lengths[i] for i in batch) for batch in found] for found in ranks]
    rounds = [max(step) / min(step) for step in zip(*longest, strict=True)]
    assert sorted(rounds)[len(rounds) // 2] < 1.2


# -- what both share


@both
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 7, 203])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks(make: Callable[..., Any], n: int, world_size: int, drop_last: bool, shuffle: bool):
    lengths = random_lengths(n)
    found = [
        list(make(lengths, shuffle=shuffle, drop_last=drop_last, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert len({len(batches) for batches in found}) == 1
    times = Counter(i for batches in found for batch in batches for i in batch)
    if drop_last:
        assert set(times.values()) <= {1}
        assert len(times) >= n - 2 * world_size * max(5, n // max(len(found[0]) * world_size, 1))
    else:
        assert sorted(times) == list(range(n))
        in_turn = [found[k % world_size][k // world_size] for k in range(world_size * len(found[0]))]
        own = list(dict.fromkeys(map(tuple, in_turn)))
        assert sorted(i for batch in own for i in batch) == list(range(n))
        again = [tuple(batch) for batch in in_turn[len(own) :]]
        assert again == [own[k % len(own)] for k in range(len(again))]


@both
def test_seeds_and_epochs(make: Callable[..., Any]):
    lengths = random_lengths(200)
    a, b, other = make(lengths, seed=4), make(lengths, seed=4), make(lengths, seed=9)
    epochs = [list(a) for _ in range(3)]
    assert epochs == [list(b) for _ in range(3)]
    assert len({str(batches) for batches in epochs}) == 3
    assert list(other) != epochs[0]
    b.set_epoch(1)
    assert (b.epoch, list(b)) == (1, epochs[1])
    assert len(a) == len(list(a))
    assert all(type(i) is int for batch in epochs[0] for i in batch)


@both
@pytest.mark.parametrize("seen", [0, 1, 5])
def test_states(make: Callable[..., Any], seen: int):
    lengths = random_lengths(200)
    sampler, again = make(lengths), make(lengths)
    want = list(make(lengths))
    it = iter(sampler)
    assert [next(it) for _ in range(seen)] == want[:seen]
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert list(again) == want[seen:]
    assert again.epoch == 1
    again.load_state_dict(
        {**sampler.state_dict(), "epoch": 0, "batch": 2}
    )  # counted by the loop, where workers are ahead
    assert list(again) == want[2:]


@both
def test_a_state_is_for_one_pass(make: Callable[..., Any]):
    sampler = make(random_lengths(200))
    want = list(make(random_lengths(200)))
    sampler.load_state_dict({**sampler.state_dict(), "batch": 2})
    assert next(iter(sampler)) == want[2]
    assert list(sampler) == want


@both
def test_states_of_others(make: Callable[..., Any]):
    sampler = make(random_lengths(200))
    with pytest.raises(StructureError, match=r"got 1 others\nat tokens: \d+, here \d+"):
        sampler.load_state_dict(make(random_lengths(200, seed=1)).state_dict())
    with pytest.raises(StructureError, match="at seed: 1, here 0"):
        sampler.load_state_dict(make(random_lengths(200), seed=1).state_dict())
    with pytest.raises(KeyPathError, match="expected a state, got a dict without"):
        sampler.load_state_dict({"epoch": 1})


@both
def test_lengths(make: Callable[..., Any]):
    lengths = random_lengths(50)
    ragged = tdc.pack([torch.zeros(n, 2) for n in lengths])
    want = list(make(lengths))
    for same in (
        tuple(lengths), torch.tensor(lengths), torch.tensor(lengths, dtype=torch.uint8), np.array(lengths), ragged,
        ragged.to_padded(), torch.tensor(lengths, dtype=torch.uint16), np.array(lengths, dtype=np.uint64),
    ):  # fmt: skip
        assert list(make(same)) == want
    images = tdc.pack([torch.zeros(2, 3), torch.zeros(4, 1)], ragged_dim=(1, 2))
    assert make(images).state_dict()["tokens"] == make(images.to_padded()).state_dict()["tokens"] == 10


@both
@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        ([1.5, 2.0], DtypeError, "got Tensor float32[2]"),
        (["a", "b"], DtypeError, "expected a ragged batch, or lengths (B,), got list"),
        (torch.zeros(3, 2, dtype=torch.int64), ShapeError, "got Tensor int64[3, 2]"),
        (torch.tensor([True, False]), ShapeError, "got Tensor bool[2]"),
        ([3, -1], ShapeError, "expected lengths of 0 or more, got one below 0 at example 1"),
        (7, DtypeError, "got int"),
        (None, DtypeError, "got NoneType"),
        (tdc.TensorDict({"x": torch.zeros(2)}, [2]), DtypeError, "hint: td['tokens'] of ragged tokens, or"),
        ([[1, 2], [3]], DtypeError, "got list"),
    ],
)
def test_wrong_lengths(make: Callable[..., Any], lengths: Any, error: type[Exception], words: str):
    with pytest.raises(error) as caught:
        make(lengths)
    assert words in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_wrong_numbers():
    for make, words in [
        (lambda: TokenBudgetSampler([1], 0), "max_tokens of 1 or more"),
        (lambda: TokenBudgetSampler([1], None), "expected an int"),
        (lambda: BucketSampler([1], 0), "batch_size of 1 or more"),
        (lambda: BucketSampler([1], 1, window=0), "window of 1 or more"),
        (lambda: BucketSampler([1], 1, rank=2, world_size=2), "a rank below world_size=2"),
        (lambda: BucketSampler([1], 1, shuffle=None), "a bool for shuffle"),
    ]:
        with pytest.raises((ShapeError, DtypeError)) as caught:
            make()
        assert words in str(caught.value)
