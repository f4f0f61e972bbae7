"""Ways to go on behind prompts of any lengths: the likeliest token, a drawn one, several at once, guesses."""

from __future__ import annotations

import torch
from decoding.decoder import END, TOKENS, Decoder, allocate, shorter, step
from torch import Tensor

import tdc


def greedy(net: Decoder, prompts: list[Tensor], most: int, rows: int = 8) -> list[list[int]]:
    """The likeliest tokens behind each prompt, `most` of them or until END; a row that is done takes the next one."""
    found: list[list[int]] = [[] for _ in prompts]
    waiting, there = list(range(len(prompts))), [-1] * rows  # which prompt is in which row
    caches, nothing = allocate(net, rows), torch.zeros(0, dtype=torch.int64)
    tokens = torch.zeros(rows, 1, dtype=torch.int64)
    while True:
        new = [nothing] * rows
        for row, prompt in enumerate(there):
            if prompt < 0 and waiting:
                there[row] = waiting.pop(0)
                new[row] = prompts[there[row]]
        begins = torch.tensor([len(x) > 0 for x in new])
        if bool(begins.any()):  # their rows begin anew, the others get nothing
            caches = shorter(caches, caches[0].length.masked_fill(begins, 0))
            scores, caches = step(net, caches, tdc.pack(new))
            last = torch.stack([x[-1] if len(x) else x.new_zeros(TOKENS) for x in scores.unbind()])
            tokens = torch.where(begins[:, None], last.argmax(-1, keepdim=True), tokens)
        if max(there) < 0:
            return found
        for row, prompt in enumerate(there):
            if prompt >= 0:
                found[prompt].append(int(tokens[row]))
                if len(found[prompt]) == most or found[prompt][-1] == END:
                    there[row] = -1
        free = torch.tensor([prompt < 0 for prompt in there])
        if not bool(free.all()):
            caches = shorter(caches, caches[0].length.masked_fill(free, 0))
            scores, caches = step(net, caches, tokens)
            tokens = scores[:, -1].argmax(-1, keepdim=True)


def sampled(net: Decoder, prompts: list[Tensor], most: int, generator: torch.Generator) -> Tensor:
    """Tokens drawn from what the network says, (B, most)."""
    scores, caches = step(net, allocate(net, len(prompts)), tdc.pack(prompts))
    last, found = scores[:, -1], []
    for _ in range(most):
        found.append(torch.multinomial(last.softmax(-1), 1, generator=generator))
        scores, caches = step(net, caches, found[-1])
        last = scores[:, -1]
    return torch.cat(found, 1)


def beams(net: Decoder, prompts: list[Tensor], most: int, width: int) -> tuple[Tensor, Tensor]:
    """The best of `width` ways behind each prompt, (B, most), and how likely it is: its log probability."""
    many = len(prompts)
    scores, caches = step(net, allocate(net, many * width), tdc.pack([p for p in prompts for _ in range(width)]))
    last = scores[:, -1].log_softmax(-1).view(many, width, TOKENS)
    total = torch.full((many, width), -torch.inf).index_fill(1, torch.tensor([0]), 0.0)  # all are alike at first
    ways = torch.zeros(many, width, 0, dtype=torch.int64)
    for i in range(most):
        total, best = (total[..., None] + last).flatten(1).topk(width)
        parent, token = best // TOKENS, best % TOKENS
        ways = torch.cat([ways.gather(1, parent[..., None].expand_as(ways)), token[..., None]], 2)
        if i < most - 1:
            rows = (parent + torch.arange(many)[:, None] * width).flatten()
            caches = [tdc.copy_(cache, cache[rows]) for cache in caches]
            scores, caches = step(net, caches, token.view(-1, 1))
            last = scores[:, -1].log_softmax(-1).view(many, width, TOKENS)
    return ways[:, 0], total[:, 0]


def speculative(net: Decoder, small: Decoder, prompts: list[Tensor], most: int, guesses: int) -> tuple[Tensor, float]:
    """The tokens of `greedy`, and how many of them each call of the network gives."""
    many = len(prompts)
    scores, caches = step(net, allocate(net, many), tdc.pack(prompts))
    _, drafts = step(small, allocate(small, many), tdc.pack(prompts))
    found = [[int(x)] for x in scores[:, -1].argmax(-1)]
    calls = 1
    while min(len(x) for x in found) < most:
        known, tokens = caches[0].length, torch.tensor([[x[-1]] for x in found])
        guessed, draft = [tokens], drafts
        for _ in range(guesses):
            said, draft = step(small, draft, guessed[-1])
            guessed.append(said[:, -1].argmax(-1, keepdim=True))
        guess = torch.cat(guessed, 1)  # (B, guesses + 1), the first of them known
        scores, caches = step(net, caches, guess)
        truth, calls = scores.argmax(-1), calls + 1
        right = (truth[:, :-1] == guess[:, 1:]).long().cumprod(1).sum(1)
        caches = shorter(caches, known + 1 + right)
        _, drafts = step(small, shorter(draft, known), guess)  # of which it has not read the last one yet
        drafts = shorter(drafts, known + 1 + right)
        for row, (n, own) in enumerate(zip(right.tolist(), truth.tolist(), strict=True)):
            found[row] += own[: n + 1]
    return torch.tensor([x[:most] for x in found]), sum([len(x) for x in found]) / many / calls
