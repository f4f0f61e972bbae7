"""Writes docs/syncs.md: the operations that read the host, from the rows of `tdc.ops.RULES`.

python docs/tools/make_syncs.py
"""

from __future__ import annotations

import runpy
from pathlib import Path

from tdc.core.rules import CLASS_NAMES
from tdc.ops import RULES

PAGE = Path(__file__).parents[1] / "syncs.md"
title = runpy.run_path(str(Path(__file__).with_name("make_support.py")))["title"]
HEAD = """\
# No hidden syncs

On a GPU Python runs ahead of the device, until it reads a number there: it waits for all that was asked for before.
An eager operation on a batch reads nothing: pointwise operations, reductions, softmax, norms, linear layers,
attention, losses, embeddings, `torch.cat`, `F.pad` and all others that are not below. Checks of data run on the
device.

## Sizes on the host

How many elements `x[:, 1:]` has follows from the lengths. A structure keeps them on the host, where one is known or
was read:

| | sizes on the host |
| --- | --- |
| `tdc.pack(rows)`, and `to(device)` of a batch on the CPU | are known without a read |
| `x[:, a:b]`, `x[a:b:c]`, `torch.cat`, `F.pad`, what keeps the lengths | are known where those of the operands are |
| any other batch on a device | are read once, when an operation needs them, and never again for its structure |

Those that need them: slices of examples and of rows, `x[i]`, `x.unbind()`, operations along one of several ragged
dims, convolutions and pooling that change sizes, products with two ragged dims, `x[:, :, None] + y`. Padding needs
`x.max_length`, which `pack` knows, `NestedTensor(..., max_length=n)` is told, and rows that are chosen
have of their own where sizes are on the host, else as a bound; else it is read once.

```python
import torch, tdc

x = tdc.pack([torch.randn(n, 8) for n in (3, 1, 2)])
with tdc.testing.forbid(syncs=True):
    y = torch.cat([x, x.relu()], 1)[:, 1:].softmax(-1).sum(1)
print(y.shape, x[1:].max_length)
```

```text
torch.Size([3, 8]) 2
```

`forbid(syncs=True)` raises an `AssertionError` with the operation and the line: at `item()`, `tolist()`, `nonzero()`,
masks as indices, `repeat_interleave` of unknown size, copies between a device and pageable memory, lists as indices
among them. It says nothing of tensors on the CPU, where no read waits.

## What each call reads

These read whatever a structure knows, and so do `x[mask]`, `x[rows]` and `x[:, :lengths]` of packed batches, and
`to_packed()` without `total=`: the number of elements. `tdc.pack` of rows on a device copies their sizes there. A
graph has nothing on the host: there, what follows from the lengths alone is an unbacked size, which it reads when it
runs. Totals that follow from those of the operands, as of `torch.cat` and `F.pad`, are known in graphs, too.

| operation | container | read on the host |
| --- | --- | --- |
"""
FOOT = """
All other rows run on fake CUDA tensors in the tests, on all their samples, and read nothing; with a GPU they run
under `torch.cuda.set_sync_debug_mode("error")`. Fake tensors do not show what a kernel of torch reads inside, as
those of `torch.linalg.eig` and `torch.multinomial` may. `python docs/tools/make_syncs.py` generates this page; a test
fails when it is out of date.
"""


def render() -> str:
    """The whole page."""
    rows: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        if rule.syncs:
            rows.setdefault((title(rule), rule.syncs), []).append(CLASS_NAMES[rule.kind])
    found: dict[tuple[str, str], list[str]] = {}
    for (name, text), kinds in rows.items():
        found.setdefault((text, ", ".join(sorted(kinds))), []).append(name)
    lines = [f"| {', '.join(names)} | {kinds} | {text} |" for (text, kinds), names in sorted(found.items())]
    return HEAD + "\n".join(lines) + "\n" + FOOT


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
