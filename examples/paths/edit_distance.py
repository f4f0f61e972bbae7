"""Dynamic programming on a batch: how many edits make one word another. Written from docs/start and docs/batch.md.

    python examples/paths/edit_distance.py

The function is that of a textbook, for one pair of words. `tdc.batch` runs it on pairs of all lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tdc
from tdc.compile import counted

MOST = 12
PAIRS = [("kitten", "sitting"), ("", "abc"), ("flaw", "lawn"), ("same", "same"), ("intention", "execution")]


@tdc.batch
def distance(source: Tensor, target: Tensor) -> Tensor:
    """Insertions, deletions and replacements between two words, each a row of letters."""
    row = torch.arange(MOST + 1)  # with room for the longest target
    for i in range(source.size(0)):
        after = row + 1
        for j in range(target.size(0)):
            replaced = row[j] + (source[i] != target[j]).long()
            after[j + 1] = torch.minimum(torch.minimum(row[j + 1], after[j]) + 1, replaced)
        row = after
    return row[target.size(0)]


def letters(words: list[str]) -> tdc.NestedTensor:
    return tdc.pack([torch.tensor(list(word.encode()), dtype=torch.int64) for word in words])


def main() -> None:
    sources, targets = letters([a for a, _ in PAIRS]), letters([b for _, b in PAIRS])
    found = distance(sources, targets)
    print("edits", found.tolist())
    alone = [int(distance(a, b)) for a, b in zip(sources.unbind(), targets.unbind(), strict=True)]
    print("as each pair alone:", found.tolist() == alone)
    fast = counted(lambda a, b: distance(a, b), backend="aot_eager")
    for n in (3, 4, 5):
        assert fast(sources[:n], targets[:n]).tolist() == alone[:n]
    print("graphs", fast.counts.graphs, "compiles", fast.counts.compiles)


if __name__ == "__main__":
    main()
