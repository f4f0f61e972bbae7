"""What do capabilities that users ask for cost on ragged rows, against padding?

    max_sim     every query against every document, 256 features, queries of up to 32 tokens and documents of up to 256
    policy      a choice of 256 at each position: its log-probability and entropy
    filter      the 50 largest of 256 logits and a nucleus of 0.9 at each position

32 rows at occupancies of 20, 35 and 77 %. `padded` is what one writes for a rectangle. Training is forward, sum of
squares and backward. Limits, on tdc over `padded`, are the occupancy of the documents and 0.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

import tdc
from bench._occupancy import against_padding, at_occupancies
from bench._timing import Call, Report, own
from bench.bench_nested import LONGEST, B, lengths_at
from tdc.ops import distribution, max_sim, top_k_top_p_filtering

D, TOKENS = 256, 32
Run = Callable[..., Any]


def padded_max_sim(q: Tensor, d: Tensor, query: Tensor, document: Tensor) -> Tensor:
    products = torch.einsum("bqd,ckd->bcqk", q, d).masked_fill(~document[:, None], -torch.inf)
    return products.amax(3).masked_fill(~query[:, None], 0).sum(2)


def padded_policy(x: Tensor, y: Tensor, real: Tensor) -> Tensor:
    d = Categorical(logits=x, validate_args=False)
    return (d.log_prob(y) + d.entropy()).masked_fill(~real, 0)


def ragged_policy(x: Any, y: Any) -> Any:
    d = distribution(Categorical, logits=x, validate_args=False)
    return d.log_prob(y) + d.entropy()


def ragged_filter(x: Any) -> Any:
    return top_k_top_p_filtering(x, 50, 0.9, filter_value=0.0)


def training(run: Run, leaves: list[Tensor], make: Run) -> Call:
    def call() -> Any:
        return torch.autograd.grad(run(*make(*leaves)).square().sum(), leaves)

    return call


def cases(occupancy: float) -> dict[str, dict[str, tuple[Run, list[Tensor], Run]]]:
    """The candidates of each row: a function, its leaves, and its arguments made of these."""
    x = tdc.pack([torch.randn(n, D) for n in lengths_at(occupancy, B, LONGEST)])
    q = tdc.pack([torch.randn(n, D) for n in lengths_at(occupancy, B, TOKENS)])
    y = x.argmax(-1)
    xs, qs = [[t.to_padded().data.clone().requires_grad_()] for t in (x, q)]
    packed, queries = [[t.values.clone().requires_grad_()] for t in (x, q)]
    real, query, chosen = x.to_padded().mask.squeeze(-1), q.to_padded().mask.squeeze(-1), y.to_padded().data
    return {
        "max_sim": {
            "padded": (padded_max_sim, [*qs, *xs], lambda a, b: (a, b, query, real)),
            "tdc": (max_sim, [*queries, *packed], lambda a, b: (q.with_values(a), x.with_values(b))),
        },
        "policy": {
            "padded": (padded_policy, xs, lambda a: (a, chosen, real)),
            "tdc": (ragged_policy, packed, lambda a: (x.with_values(a), y)),
        },
        "filter": {
            "padded": (ragged_filter, xs, lambda a: (a,)),
            "tdc": (ragged_filter, packed, lambda a: (x.with_values(a),)),
        },
    }


def measure(report: Report, occupancy: float) -> None:
    """All rows at one occupancy, eagerly and compiled."""
    for name, group in cases(occupancy).items():
        torch._dynamo.reset()
        calls = {}
        for who, (run, leaves, make) in group.items():
            compiled = torch.compile(own(run), fullgraph=True)
            calls |= {who: training(run, leaves, make), f"{who}, compiled": training(compiled, leaves, make)}
        against_padding(report, f"{name}, {occupancy:.0%}", calls, occupancy)


def main() -> None:
    question = "What do capabilities that users ask for cost on ragged rows, against padding?"
    at_occupancies("bench_asked", question, measure)


if __name__ == "__main__":
    main()
