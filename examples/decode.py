"""Decoding with a cache of ragged rows: prompts of any lengths, one token of each row at a time, no padding.

    python examples/decode.py

    greedy        a row that ends takes the next prompt: eight at a time, forty in all
    sampling      of each row's own distribution
    beam          the best of four continuations, whose caches exchange rows
    speculative   a small network guesses four tokens, the large one reads all of them at once and keeps what is right

Each is compared with the loop over prompts that recomputes everything, and greedy decoding with the loop over a padded
batch. The network is random: what it says means nothing, how it is made is what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from decoding.decoder import TOKENS, Decoder, alone, padded
from decoding.ways import beams, greedy, sampled, speculative


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a call, and the seconds that it takes once it is warm."""
    call()
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    net, small = Decoder(3).eval(), Decoder(3).eval()
    small.load_state_dict({name: x + 0.02 * torch.randn_like(x) for name, x in net.state_dict().items()})
    prompts = [torch.randint(1, TOKENS, (n,)) for n in torch.randint(2, 80, (40,)).tolist()]
    with torch.no_grad():
        expected = [alone(net, p, 24) for p in prompts]
        found, seconds = timed(lambda: greedy(net, prompts, 24))
        count = sum([len(x) for x in found])
        print(f"greedy: {count / seconds:.0f} tokens/s, as each prompt alone: {found == expected}")
        few = prompts[:8]
        rows, seconds = timed(lambda: padded(net, few, 24))
        ours, own = timed(lambda: greedy(net, few, 24))
        same = all([a[: len(b)].tolist() == b for a, b in zip(rows, ours, strict=True)])
        speeds = f"{rows.numel() / seconds:.0f} tokens/s padded, {sum([len(x) for x in ours]) / own:.0f} ragged"
        print(f"eight at once: {speeds}, the same: {same} (bench/bench_decode.py has the sizes where it counts)")
        drawn = [sampled(net, few, 24, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
        print(f"sampling: repeated {torch.equal(*drawn[:2])}, differs with the seed {not torch.equal(*drawn[1:])}")
        likely = [beams(net, few, 12, width)[1].sum() for width in (1, 4)]
        first = beams(net, few, 12, 1)[0]
        same = all([a[: len(b)].tolist() == b[:12] for a, b in zip(first, ours, strict=True)])
        print(f"beam: one is greedy {same}, four are likelier {bool(likely[1] >= likely[0])}")
        guessed, each = speculative(net, small, few, 24, 4)
        same = all([a[: len(b)].tolist() == b for a, b in zip(guessed, ours, strict=True)])
        print(f"speculative: {each:.1f} tokens of each call, as greedy: {same}")


if __name__ == "__main__":
    main()
