"""A served model of the worst kind of clients: calls of an AOTInductor package with broken arguments, by a seed.

    python tests/compile/fuzz_package.py net.pt2 calls seed

Each call is right or an error in words. The last line printed counts both; a package that ends the process prints none.
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, TensorDict

VOCABULARY, FEATURES, ROWS, LONGEST = 50, 16, 64, 512


class Net(nn.Module):
    """Tokens and weights of positions to classes, by way of embeddings, attention, a reduction and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, FEATURES)
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 32, batch_first=True)
        self.head = nn.Linear(2 * FEATURES, 3)

    def forward(self, td: TensorDict, scale: Tensor) -> tuple[Tensor, NestedTensor]:
        x = self.layer(self.table(td["tokens"]) * td["weight"][..., None])
        y = torch.cat([x.mean(1), x.amax(1)], -1)
        return self.head(y) * scale, x.softmax(1).cumsum(1)


def batch(lengths: list[int]) -> TensorDict:
    """A valid batch."""
    tokens = tdc.pack([torch.randint(VOCABULARY, (n,)) for n in lengths])
    weight = tokens.with_values(torch.rand(sum(lengths)))
    return TensorDict({"tokens": tokens, "weight": weight, "id": torch.arange(len(lengths))}, [len(lengths)])


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def save(path: Path) -> Path:
    dims = {"td": {"batch": ("B", 0, ROWS), "tokens": {"length": ("L", 0, LONGEST)}}}
    program = tdc.compile.export(net(), (batch([300, 500, 200]), torch.ones(3)), dynamic={**dims, "scale": False})
    return program.save(path, format="aoti")


def with_offsets(td: TensorDict, change: Any, both: bool) -> TensorDict:
    """The batch with other offsets, of one leaf or of both."""
    offsets = change(td["tokens"].offsets.clone())
    broken = {k: NestedTensor(td[k].values, offsets) for k in (("tokens", "weight") if both else ("weight",))}
    return TensorDict({**dict(td.items()), **broken}, [len(offsets) - 1])


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


def beyond(x: Tensor) -> Tensor:
    x[-1] += random.choice([1, 7, 10**6, 2**40])
    return x


def before(x: Tensor) -> Tensor:
    x[0] -= random.choice([1, 7, 10**6, 2**40])
    return x


def down(x: Tensor) -> Tensor:
    if len(x) > 2:
        x[1] = x[-1] + 3
    return x


def longer(x: Tensor) -> Tensor:
    return torch.cat([x, x[-1:] + 5])


OFFSETS = [shuffled, beyond, before, down, longer, torch.zeros_like, lambda x: x * 2, lambda x: -x, lambda x: x.flip(0)]


def tokens(td: TensorDict, change: Any) -> TensorDict:
    x = td["tokens"]
    return td.set("tokens", x.with_values(change(x.values)))


def weight(td: TensorDict, value: Any) -> TensorDict:
    return td.set("weight", value)


def huge(rows: int, length: int) -> TensorDict:
    """A batch whose offsets promise more than there is, or that holds much."""
    offsets = torch.arange(rows + 1) * length
    x = NestedTensor(torch.zeros(min(rows * length, 200_000), dtype=torch.int64), offsets)
    y = NestedTensor(torch.zeros(min(rows * length, 200_000)), offsets)
    return TensorDict({"tokens": x, "weight": y, "id": torch.arange(rows)}, [rows])


BROKEN = [
    lambda td: with_offsets(td, random.choice(OFFSETS), both=True),
    lambda td: with_offsets(td, random.choice(OFFSETS), both=False),
    lambda td: tokens(td, lambda x: x + random.choice([50, -60, 10**9, 2**40])),
    lambda td: tokens(td, lambda x: torch.where(torch.rand(x.shape) < 0.1, 99, x)),
    lambda td: tokens(td, lambda x: x.int()),
    lambda td: tokens(td, lambda x: x.float()),
    lambda td: tokens(td, lambda x: x[:, None]),
    lambda td: weight(td, td["weight"].double()),
    lambda td: weight(td, td["weight"].to_padded()),
    lambda td: weight(td, tdc.pack([torch.rand(n + 1) for n in td["tokens"].lengths.tolist()] or [torch.rand(2)])),
    lambda td: weight(td, td["weight"][..., None]),
    lambda td: td.delete("id"),
    lambda td: td.set("more", td["id"]),
    lambda td: td.to_dict(),
    lambda td: huge(random.choice([1, 3, 65, 10**5]), random.choice([1, 600, 10**7])),
    lambda td: huge(random.choice([1, 3, 64]), random.choice([1, 500, 512])),
    lambda td: batch([random.choice([0, 513, 2000]) for _ in range(3)]),
    lambda td: batch([1] * random.choice([65, 300])),
    lambda td: td[:0],
    lambda td: None,
]
SCALES = [*[torch.ones(3)] * 20, torch.ones(4), torch.ones(3).double(), torch.ones(()), torch.ones(3, 1), 1.0, None]


def draw() -> tuple[Any, Any]:
    """One call."""
    lengths = [random.choice([0, 0, 1, 2, 3, 7, 40, 300]) for _ in range(random.choice([1, 1, 2, 3, 8]))]
    td: Any = batch(lengths)
    if random.random() < 0.7:
        with suppress(tdc.TdcError):  # refused where it is made
            td = random.choice(BROKEN)(td)
    return td, random.choice(SCALES)


def is_right(loaded: Any, model: Net, td: Any, scale: Any) -> bool | str:
    """True for results as of the model, False for an error in words; else what is wrong."""
    try:
        got = loaded(td, scale)
    except (tdc.TdcError, RuntimeError) as error:
        words = "tdc." in str(error) or "index out of bounds" in str(error)
        return False if words else f"{type(error).__name__}: {str(error)[:300]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    want = model(td, scale)
    same = all([torch.allclose(a, b, atol=1e-4, equal_nan=True) for a, b in zip(flat(got), flat(want), strict=True)])
    return same or "other numbers than the model"


def flat(results: tuple[Tensor, NestedTensor]) -> list[Tensor]:
    return [results[0], results[1].values]


def main(path: str, calls: int, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    loaded, model, counts = tdc.compile.load(path), net(), {True: 0, False: 0}
    for i in range(calls):
        td, scale = draw()
        found = is_right(loaded, model, td, scale)
        if isinstance(found, str):
            print(f"call {i} of seed {seed}: {found}", flush=True)
        else:
            counts[found] += 1
    print(f"{counts[True]} right, {counts[False]} refused")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
