"""Greedy and beam decoding with a language model whose keys and values are kept, each example until its own end.

    python examples/batch/decoding.py

`step` is one layer of attention for one token of one text. It writes the token's key and value at its place in a
cache, and looks at what stands there so far. The weights are random, but the end of a text gets likelier with time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from three_ways import compare
from torch import Tensor, nn

import tdc

TOKENS, WIDTH, MOST, BEAMS, END = 16, 32, 12, 2, 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.place = nn.Parameter(torch.randn(MOST + 1, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, TOKENS)

    @tdc.batch
    def step(self, token: Any, t: Any, keys: Tensor, values: Tensor) -> Any:
        """Log probabilities of what follows token number t, and the caches with it."""
        x = self.token[token] + self.place[t]
        query, key, value = self.qkv(x).chunk(3)
        keys[t], values[t] = key, value
        scores = (keys @ query / math.sqrt(WIDTH)).masked_fill(torch.arange(MOST) > t, -torch.inf)
        logits = 3 * self.out(x + scores.softmax(0) @ values)
        logits[END] += 0.3 * t
        return logits.log_softmax(0), keys, values

    @tdc.batch
    def greedy(self, prompt: Tensor) -> Any:
        """A prompt and the most likely token after each, how many there are, and the log probability of these."""
        keys, values = torch.zeros(MOST, WIDTH), torch.zeros(MOST, WIDTH)
        text, token, t, total = torch.zeros(MOST + 1, dtype=torch.long), prompt[0], 0, 0.0
        text[0] = token
        while token != END and t < MOST:
            found, keys, values = self.step(token, t, keys, values)
            t += 1
            if t < prompt.size(0):
                token = prompt[t]
            else:
                token = found.argmax()
                total = total + found[token]
            text[t] = token
        return text, t, total

    @tdc.batch
    def beam(self, prompt: Tensor) -> Any:
        """The likeliest of several texts that are continued side by side, until none of them can become likelier."""
        keys, values = torch.zeros(BEAMS, MOST, WIDTH), torch.zeros(BEAMS, MOST, WIDTH)
        texts, t = torch.cat([prompt[0].expand(BEAMS, 1), torch.zeros(BEAMS, MOST, dtype=torch.long)], 1), 0
        totals = torch.tensor([0.0] + [-torch.inf] * (BEAMS - 1))  # all beams begin alike: one counts
        best, best_total = texts[0], torch.tensor(-torch.inf)
        while t < MOST and totals[0] > best_total:
            ways = []
            for b in range(BEAMS):
                found, keys[b], values[b] = self.step(texts[b, t], t, keys[b], values[b])
                ways.append(totals[b] + found)
            t += 1
            if t < prompt.size(0):
                texts[:, t] = prompt[t]
            else:
                totals, at = torch.cat(ways).topk(2 * BEAMS)  # at most one way of each beam ends
                old, new = at // TOKENS, at % TOKENS
                texts, keys, values = texts[old], keys[old], values[old]
                texts[:, t] = new
                ended = totals.masked_fill((new != END) & (t < MOST), -torch.inf)
                if ended.max() > best_total:
                    best, best_total = texts[ended.argmax()], ended.max()
                totals, order = totals.masked_fill(new == END, -torch.inf).topk(BEAMS)
                texts, keys, values = texts[order], keys[order], values[order]
        return best, best_total


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    prompts = tdc.pack([torch.randint(1, TOKENS, (1 + i % 4,)) for i in range(32)])
    with torch.no_grad():
        greedy = compare(model.greedy, model.greedy, prompts)
        beam = compare(model.beam, model.beam, prompts)
        texts, ends, totals = greedy(prompts)
        beam_texts, beam_totals = beam(prompts)
    for i, prompt in enumerate(prompts.unbind()[:6]):
        print(f"prompt {prompt.tolist()}  greedy {texts[i, : ends[i] + 1].tolist()} {totals[i]:.2f}")
        print(f"    beam {beam_texts[i, : beam_texts[i].count_nonzero() + 1].tolist()} {beam_totals[i]:.2f}")
    assert beam_totals.mean() > totals.mean(), "beams found nothing better"


if __name__ == "__main__":
    main()
