"""The demo's corpus: the same on every machine, a split that does not leak, and figures that make sense.

Rules are tested on a small tree of sources, whose docstrings are known; the real standard library only has to lie in
a sane range, since every Python release changes it.
"""

import statistics
import warnings
from collections import Counter

import pytest
import torch

from examples.demo import data
from examples.demo.data import (
    Corpus,
    batches,
    length_histogram,
    load_docstrings,
    majority_accuracy,
    padded_occupancy,
    split,
    tokens,
)


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_docstrings()


@pytest.fixture
def sources(tmp_path):
    """Two classes of three docstrings, and everything that has to be left out."""
    files = {
        "alpha/__init__.py": '"""Alpha itself."""\nclass A:\n    """A class."""\n',
        "alpha/deep/part.py": 'if True:\n    async def f():\n        """An async function."""\n',
        "beta.py": '"""Beta."""\ndef f():\n    """Outer."""\n    def g():\n        """Größe in Ångström."""\n',
        "rare.py": '"""The only one."""\n', "alpha/test/case.py": '"""A test."""\n',
        "test/case.py": '"""Another test."""\n', "site-packages/other.py": '"""Installed."""\n',
        "idlelib/__init__.py": '"""An application."""\n', "beta_same.py": '"""Alpha itself, twice."""\n',
        "alpha/twice.py": '"""Alpha itself, twice."""\n\ndef f():\n    """A class."""\n',
        "broken.py": 'def f(:\n    """Never parsed."""\n', "null.py": 'x = "\0"\n',
        "escape.py": '"""An invalid escape."""\nx = "\\d"\n',
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_known_sources(sources):
    corpus = load_docstrings(min_per_class=3, root=sources)
    assert corpus.classes == ("alpha", "beta")
    assert list(zip(corpus.labels, corpus.texts, strict=True)) == [
        (0, b"A class."), (0, b"Alpha itself."), (0, b"An async function."), (1, b"Beta."),
        (1, "Größe in Ångström.".encode()), (1, b"Outer."),
    ]  # fmt: skip


def test_the_order_of_the_file_system_does_not_matter(sources, monkeypatch):
    corpus = load_docstrings(min_per_class=1, root=sources)
    assert load_docstrings(min_per_class=1, root=sources) == corpus
    backwards = list(data._docstrings(sources))[::-1]
    monkeypatch.setattr(data, "_docstrings", lambda _: iter(backwards))
    assert load_docstrings(min_per_class=1, root=sources) == corpus


def test_texts_are_cut_at_a_byte_and_then_compared(sources):
    corpus = load_docstrings(max_bytes=5, min_per_class=1, root=sources)
    assert max(corpus.lengths) == 5
    assert "Größe".encode()[:5] in corpus.texts
    assert b"An in" in corpus.texts


def test_sources_are_parsed_in_silence(sources):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_docstrings(min_per_class=1, root=sources)


def test_no_sources_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a class with 50 docstrings") as caught:
        load_docstrings(root=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_split_is_a_property_of_the_text(sources):
    few = load_docstrings(min_per_class=3, root=sources)
    many = load_docstrings(min_per_class=1, root=sources)
    side = dict(zip(many.texts, many.is_test, strict=True))
    assert [side[text] for text in few.texts] == list(few.is_test)


@pytest.mark.slow
def test_standard_library_in_sane_ranges(stdlib):
    sizes = Counter(stdlib.labels)
    assert 3_000 < len(stdlib) < 9_000
    assert 20 < len(stdlib.classes) < 60
    assert min(sizes.values()) >= 50
    assert max(sizes.values()) < 0.25 * len(stdlib)
    assert 60 < statistics.median(stdlib.lengths) < 130
    assert min(stdlib.lengths) >= 1
    assert max(stdlib.lengths) == 512
    assert 0.17 < sum(stdlib.is_test) / len(stdlib) < 0.23
    assert 0.05 < majority_accuracy(stdlib) < 0.3


@pytest.mark.slow  # reads the standard library
def test_standard_library_invariants(stdlib):
    assert len(stdlib.texts) == len(stdlib.labels) == len(stdlib.is_test) == len(stdlib)
    assert set(stdlib.labels) == set(range(len(stdlib.classes)))
    assert list(stdlib.classes) == sorted(set(stdlib.classes))
    assert len(set(stdlib.texts)) == len(stdlib)
    order = list(zip(stdlib.labels, stdlib.texts, strict=True))
    assert order == sorted(order)
    assert "test" not in stdlib.classes


@pytest.mark.slow  # reads the standard library
def test_split_is_disjoint_and_complete(stdlib):
    train, test = split(stdlib)
    assert sorted(train + test) == list(range(len(stdlib)))
    assert not {stdlib.texts[index] for index in train} & {stdlib.texts[index] for index in test}


@pytest.mark.slow  # reads the standard library
def test_tokens_are_the_bytes(stdlib):
    indices = (0, len(stdlib) - 1, 7)
    found = tokens(stdlib, indices)
    assert [token.dtype for token in found] == [torch.int64] * 3
    assert [bytes(token.tolist()) for token in found] == [stdlib.texts[index] for index in indices]
    found[0].zero_()  # its own memory, never the corpus'
    assert bytes(tokens(stdlib, indices)[0].tolist()) == stdlib.texts[0]


@pytest.mark.slow  # reads the standard library
def test_batches_visit_every_index_once_with_a_smaller_last_one(stdlib):
    indices = tuple(range(3, 100))
    made = batches(stdlib, indices, 32, seed=1, epoch=0)
    assert list(map(len, made)) == [32, 32, 32, 1]
    assert sorted(index for batch in made for index in batch) == list(indices)


@pytest.mark.slow  # reads the standard library
def test_batches_depend_on_seed_and_epoch_only(stdlib):
    indices = tuple(range(100))
    state = torch.get_rng_state()
    first = batches(stdlib, indices, 32, seed=1, epoch=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert batches(stdlib, indices, 32, seed=1, epoch=0) == first
    assert batches(stdlib, indices, 32, seed=1, epoch=1) != first
    assert batches(stdlib, indices, 32, seed=2, epoch=0) != first


@pytest.mark.slow  # reads the standard library
def test_no_indices_no_batches(stdlib):
    assert batches(stdlib, (), 4, seed=0, epoch=0) == []


@pytest.mark.slow  # reads the standard library
def test_length_histogram_counts_every_length_once(stdlib):
    edges, counts = length_histogram(stdlib.lengths, 32)
    assert edges == tuple(range(0, 513, 16))
    assert sum(counts) == len(stdlib)
    assert counts[-1] == sum(length > 496 for length in stdlib.lengths)
    assert length_histogram([], 2) == ((0, 1, 2), (0, 0))
    assert length_histogram([0, 1, 5], 2) == ((0, 3, 6), (2, 1))


@pytest.mark.slow  # reads the standard library
def test_padded_occupancy_against_a_padded_batch(stdlib):
    made = batches(stdlib, tuple(range(50)), 16, seed=0, epoch=0)
    real = padded = 0
    for batch in made:
        block = torch.nn.utils.rnn.pad_sequence(tokens(stdlib, batch), padding_value=-1)
        real, padded = real + int((block >= 0).sum()), padded + block.numel()
    assert padded_occupancy(stdlib.lengths, made) == real / padded
    assert padded_occupancy([5, 5], [(0, 1)]) == 1.0
    assert padded_occupancy([], []) == 1.0
