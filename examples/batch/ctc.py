"""The loss of connectionist temporal classification (Graves et al. 2006), written for one pair with plain loops.

    python examples/batch/ctc.py

How likely is a text, given the chances of each letter at each time? Between letters there may be blanks, and letters
may last. `ctc` adds up all ways to say the text, one time after another. Recordings and texts have their own lengths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from three_ways import compare
from torch import Tensor

import tdc

PAIRS, LETTERS, MOST, BLANK, NEVER = 16, 6, 5, 0, -1e30  # NEVER: the logarithm of nearly nothing


@tdc.batch
def ctc(log_probs: Tensor, text: Tensor) -> Tensor:
    """Minus the logarithm of the chance of a text (U,), given log_probs (T, letters)."""
    places = 2 * text.size(0) + 1  # blank, letter, blank, ..., letter, blank
    alpha = torch.full((2 * MOST + 1,), NEVER)
    alpha[0] = 0.0
    begun = False
    for row in log_probs:
        after = torch.full((2 * MOST + 1,), NEVER)
        for s in range(places):
            letter = BLANK if s % 2 == 0 else text[s // 2]
            ways = alpha[s]
            if s > 0 and (begun or s == 1):
                ways = torch.logaddexp(ways, alpha[s - 1])
            if begun and s > 1 and s % 2 == 1 and text[s // 2] != text[s // 2 - 1]:
                ways = torch.logaddexp(ways, alpha[s - 2])
            after[s] = ways + row[letter]
        alpha, begun = after, True
    return -torch.logaddexp(alpha[places - 1], alpha[places - 2])


def loss(logits: Tensor, text: Tensor) -> Tensor:
    """The loss of one pair, or of a batch."""
    return ctc(logits.log_softmax(-1), text)


def main() -> None:
    torch.manual_seed(0)
    times = torch.randint(10, 20, (PAIRS,))
    lengths = torch.randint(1, MOST + 1, (PAIRS,))
    logits = tdc.pack([torch.randn(int(t), LETTERS) for t in times])
    texts = tdc.pack([torch.randint(1, LETTERS, (int(u),)) for u in lengths])
    logits.values.requires_grad_()
    # Inductor of torch 2.13 writes a size into the backward of this program that Python cannot read
    run = compare(loss, loss, logits, texts, wrt=[logits.values], backend="aot_eager")

    ours = run(logits, texts)
    padded = logits.log_softmax(-1).to_padded().data.transpose(0, 1)
    theirs = F.ctc_loss(padded, texts.values, times, lengths, blank=BLANK, reduction="none")
    torch.testing.assert_close(ours, theirs)
    found, want = [torch.autograd.grad(x.sum(), logits.values)[0] for x in (ours, theirs)]
    torch.testing.assert_close(found, want)
    for n, length, value, other in zip(times[:4], lengths[:4], ours[:4], theirs[:4], strict=True):
        print(f"{n} times, {length} letters: loss {value:.4f}, of F.ctc_loss {other:.4f}")


if __name__ == "__main__":
    main()
