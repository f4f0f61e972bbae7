"""Examples moved between ranks so that every rank has as much to do, and results moved back.

    costs       rank 0  9 1 1      rank 1  2 8 3      11 and 13
    balanced            9 1 2              1 8 3      12 and 12

Every rank makes the same plan of the costs of all: the most expensive example first, each to the rank with the lowest
sum so far. Against the best plan this loses little, and nothing that shows in a step.

Invariants: an example stays whole; `restore` undoes `balance` for anything with a row for each example.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.dist.copies import all_gather, all_to_all
from tdc.dist.form import described
from tdc.dist.transport import ranks_of, taking_part

OP = "dist.balance"


@dataclass(frozen=True, eq=False)
class Moves:
    """Moves of the examples of this rank, which `restore` needs.

    Attributes:
        order: positions on this rank of the examples that it gave away or kept, by the rank they went to.
        given: how many went to each rank.
        taken: how many came from each.
        group: the process group.
    """

    order: Tensor
    given: tuple[int, ...]
    taken: tuple[int, ...]
    group: Any


def balance(td: Any, cost: Tensor, *, equal: bool = False, group: Any = None) -> tuple[Any, Moves]:
    """Move whole examples between ranks so that the sums of their costs are even.

    Two handshakes, a message of costs and one from each rank to each, of the rows that move.

    Shapes:
        td `(n, ...)` and cost `(n,)`, with any n on each rank, none too.

    Dtypes:
        cost is a number of any real dtype.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch.
        cost: of each example, not negative: tokens, or the square of tokens where attention counts.
        equal: give all ranks equally many examples, or one more.
        group: a process group or a DeviceMesh of one dim; the default group without it.

    Returns:
        The examples of this rank, those of lower ranks first; and what `restore` takes to bring results back.

    Raises:
        DtypeError: cost is not a tensor of real numbers.
        ShapeError: another number of costs than of examples; costs that are negative or NaN.
        StructureError: as `all_to_all`.

    Compile:
        Eager only: call it in front of the step. The gradient is that of the sum of all ranks' losses.

    Example:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> from tdc.ragged.pack import from_list
        >>> text = from_list([[1, 2, 3], [4]])
        >>> mine, back = balance(text, text.lengths)
        >>> restore(mine * 2, back).tolist()
        [[2, 4, 6], [8]]
        >>> dist.destroy_process_group()

    Source:
        Graham, Bounds on multiprocessing timing anomalies, 1969: longest processing time first.
    """
    ranks = ranks_of(OP, group)
    with taking_part(OP, ranks):
        check_costs(td, cost)
    costs, counts = all_gather(cost.detach().double().cpu(), counts=True, group=group)
    numbers: list[int] = counts.tolist()
    begin = sum(numbers[: ranks.rank])
    targets = plan(costs.tolist(), ranks.world, equal)
    own = targets[begin : begin + numbers[ranks.rank]]
    order = torch.tensor(sorted(range(len(own)), key=own.__getitem__), dtype=torch.int64, device=cost.device)
    given = tuple([own.count(r) for r in range(ranks.world)])
    ends = [sum(numbers[:r]) for r in range(ranks.world + 1)]
    taken = tuple([targets[a:b].count(ranks.rank) for a, b in pairwise(ends)])
    moves = Moves(order, given, taken, group)
    return torch.cat(all_to_all([td[rows] for rows in order.split(given)], group=group)), moves


def restore(td: Any, back: Moves) -> Any:
    """Bring results of examples that `balance` moved back to the ranks and the order they came from.

    Args:
        td: a structure with a row for each example that this rank has got, in their order: results of a model, or
            the examples themselves.
        back: the second result of `balance`.

    Raises:
        ShapeError: another number of rows.
        StructureError: as `all_to_all`.

    Compile:
        Eager only. The gradient is that of the sum of all ranks' losses.

    Example:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mine, back = balance(torch.tensor([1, 5, 3]), torch.tensor([1, 5, 3]))
        >>> restore(mine, back)
        tensor([1, 5, 3])
        >>> dist.destroy_process_group()
    """
    op = "dist.restore"
    ranks = ranks_of(op, getattr(back, "group", None))
    with taking_part(op, ranks):
        if not isinstance(back, Moves):
            raise DtypeError(message(op, "the second result of balance", describe(back), hint="restore(td, back)"))
        if described(op, td).td._size[:1] != (sum(back.taken),):
            hint = "one row for each example of the first result of balance"
            raise ShapeError(message(op, f"{sum(back.taken)} rows", describe(td), hint=hint))
    found = torch.cat(all_to_all(list(rows_of(td, back.taken)), group=back.group))
    return found[back.order.argsort()]


def rows_of(td: Any, counts: Sequence[int]) -> list[Any]:
    """The rows of a structure, so many at a time."""
    ends = [sum(counts[:r]) for r in range(len(counts) + 1)]
    return [td[a:b] for a, b in pairwise(ends)]


def check_costs(td: Any, cost: Any) -> None:
    """Refuse what cannot be a cost for each example."""
    if not isinstance(cost, Tensor) or cost.is_complex() or cost.dtype == torch.bool:
        hint = "x.lengths of a ragged batch, or torch.tensor([...])"
        raise DtypeError(message(OP, "a tensor of real numbers as cost", describe(cost), hint=hint))
    if described(OP, td).td._size[:1] != cost.shape:
        got = f"{describe(cost)} for {describe(td)}"
        raise ShapeError(message(OP, "a cost for each example", got, hint="cost of shape (n,) for n rows"))
    if not bool((cost >= 0).all()):
        raise ShapeError(message(OP, "costs of at least 0", "negative ones or NaN", hint="a count, such as x.lengths"))


def plan(costs: Sequence[float], world: int, equal: bool) -> list[int]:
    """The rank of each example: the most expensive first, each to the rank with the lowest sum so far.

    Example:
        >>> plan([9, 1, 1, 2, 8, 3], 2, False), plan([9, 1, 1, 2, 8, 3], 2, True)
        ([0, 0, 1, 0, 1, 1], [0, 0, 1, 0, 1, 1])
    """
    most, more = divmod(len(costs), world)
    room = [most + (r < more) if equal else len(costs) for r in range(world)]
    sums = [(0.0, r) for r in range(world)]
    targets = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, r = heapq.heappop(sums)
        targets[i] = r
        room[r] -= 1
        if room[r]:
            heapq.heappush(sums, (total + costs[i], r))
    return targets
