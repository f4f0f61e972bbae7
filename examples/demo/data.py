"""The demo's data: the docstrings of Python's own standard library.

Every machine that runs the demo already holds a ragged data set: the sources of its standard library. One example
is one docstring (of a module, class or function) as UTF-8 bytes, and the label is the top-level package or module
it stands in. Most docstrings are one line, some are essays, so that a padded batch is mostly padding.

Rules, each with its reason:

- test suites are left out (they are half of the docstrings, and a distribution may strip them), installed packages
  too, and idlelib: it is an application, not a library;
- one example per text, and a text found in two classes is dropped: it has no one right label;
- a class needs `min_per_class` examples, counted after that;
- the split is a hash of the text, so a text stays on its side when Python gains or loses a module.

Invariants: examples are sorted by (class, text), so the order of the file system cannot matter; texts are unique,
not empty and at most `max_bytes` long; the same sources give the same corpus, batches included, on every machine.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEST_SHARE = 5  # one text in five is a test text

_SKIPPED_ROOTS = frozenset({"site-packages", "dist-packages", "idlelib"})
_SKIPPED_FOLDERS = frozenset({"test", "tests", "__pycache__"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Labelled texts with a fixed split; the four per-example fields run in parallel."""

    texts: tuple[bytes, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    is_test: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each text, in bytes."""
        return tuple(map(len, self.texts))


def load_docstrings(max_bytes: int = 512, min_per_class: int = 50, *, root: Path | None = None) -> Corpus:
    """Read the docstrings of the standard library.

    Args:
        max_bytes: texts are cut to this many bytes of UTF-8 (the last character may be cut in two).
        min_per_class: classes with fewer examples are left out.
        root: the folder of sources to read; the running Python's standard library when None.

    Returns:
        The corpus. On Python 3.11: 5,544 texts in 39 classes, median 94 bytes, in about 3 seconds.

    Raises:
        FileNotFoundError: no class has enough docstrings, as where Python was installed without its sources.

    Example:
        >>> corpus = load_docstrings()
        >>> len(corpus.texts) == len(corpus.labels) == len(corpus.is_test)
        True
        >>> max(corpus.lengths)
        512
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    classes_of: dict[bytes, set[str]] = defaultdict(set)
    for name, text in _docstrings(root):
        classes_of[text[:max_bytes]].add(name)
    pairs = sorted((min(names), text) for text, names in classes_of.items() if len(names) == 1)
    counts = Counter(name for name, _ in pairs)
    classes = tuple(sorted(name for name, count in counts.items() if count >= min_per_class))
    if not classes:
        raise FileNotFoundError(
            f"examples.demo.load_docstrings: expected a class with {min_per_class} docstrings or more, "
            f"got none among {len(counts)}\n"
            f"at {root}\n"
            "hint: run a Python that was installed with the sources of its standard library"
        )
    index = {name: label for label, name in enumerate(classes)}
    kept = [(index[name], text) for name, text in pairs if name in index]
    return Corpus(
        texts=tuple(text for _, text in kept),
        labels=tuple(label for label, _ in kept),
        classes=classes,
        is_test=tuple(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % TEST_SHARE == 0 for _, text in kept),
    )


def split(corpus: Corpus) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of the training texts and of the test texts, each ascending."""
    train = tuple(index for index, test in enumerate(corpus.is_test) if not test)
    test = tuple(index for index, test in enumerate(corpus.is_test) if test)
    return train, test


def majority_accuracy(corpus: Corpus) -> float:
    """The test accuracy of always answering the commonest training class: what a model has to beat."""
    train, test = split(corpus)
    if not train or not test:
        return 0.0
    answer = Counter(corpus.labels[index] for index in train).most_common(1)[0][0]
    return sum(corpus.labels[index] == answer for index in test) / len(test)


def tokens(corpus: Corpus, indices: Sequence[int]) -> list[Tensor]:
    """The texts at `indices` as token tensors: (L,) int64 each, one token per byte."""
    # bytearray: torch.frombuffer warns about memory it may not write to, and bytes are read-only
    return [torch.frombuffer(bytearray(corpus.texts[index]), dtype=torch.uint8).long() for index in indices]


def batches(corpus: Corpus, indices: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Shuffle `indices` into batches, the last one of what is left.

    The order depends on `seed` and `epoch` and on nothing else; torch's global generator is not touched.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(indices), generator=generator).tolist()
    shuffled = [indices[position] for position in order]
    return [tuple(shuffled[start : start + batch_size]) for start in range(0, len(shuffled), batch_size)]


def length_histogram(lengths: Sequence[int], bins: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count lengths in `bins` bins of one width: the `bins + 1` ascending edges, from 0 on, and the counts.

    A length lies in the bin with `lower < length <= upper`; a length of 0 lies in the first.

    Example:
        >>> length_histogram([1, 2, 3, 8], bins=2)
        ((0, 4, 8), (3, 1))
    """
    width = max(1, -(-max(lengths, default=0) // bins))
    counts = Counter(max(0, length - 1) // width for length in lengths)
    return tuple(width * edge for edge in range(bins + 1)), tuple(counts[position] for position in range(bins))


def padded_occupancy(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of real tokens, in (0, 1], if each batch of indices were padded to its longest member.

    Example:
        >>> padded_occupancy([1, 3, 4], [(0, 1), (2,)])
        0.8
    """
    real = sum(lengths[index] for batch in batches for index in batch)
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches if batch)
    return real / padded if padded else 1.0


def _docstrings(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (top-level name, docstring) for every file that reads and parses."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] in _SKIPPED_ROOTS or not _SKIPPED_FOLDERS.isdisjoint(parts[:-1]):
            continue
        name = parts[0].removesuffix(".py")
        try:
            with warnings.catch_warnings():  # old sources hold invalid escapes, which newer parsers warn about
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes(), str(path))
        except (OSError, SyntaxError, ValueError):  # templates and fixtures that are not meant to parse
            continue
        for node in _documented(tree):
            if text := ast.get_docstring(node):
                yield name, text.encode("utf-8", "replace")


def _documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Walk the statements only: `ast.walk` would visit every expression, three times the work."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, _DOCUMENTED):
            yield node
        for field in _BODIES:
            body = getattr(node, field, None)
            if isinstance(body, list):  # `body` of a lambda or a conditional expression is a single node
                stack.extend(body)
