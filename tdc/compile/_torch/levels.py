"""A level of vmap by hand, from inside, and rules of vmap that torch lacks (torch 2.11-2.15).

    map_lanes(fn, tensors, count)   run a function for each example, on lists of tensors
    current_level()                 number of the innermost level
    physical(x, level)              tensor of all examples behind one example's
    mapped(x, level)                tensor of one example, from that of all
    outside()                       context without the level: code in it runs once for the whole batch

Recurrent cells are decomposed; recurrent layers and attention on CPU run once, for the sequences or heads of all
examples. A rule runs where its level is being taken away: its calls on tensors of all examples stay below it, autograd
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import has_side_effect

from tdc.compile._torch.patches import patched
from tdc.core.dynamo import has_kernel, is_batched, scripting
from tdc.core.errors import UnsupportedError, message, refusing
from tdc.core.private import find, find_or, nothing, optional
from tdc.core.torch_functions import fused_cpu_forward

NESTING = ("_vmap_increment_nesting", "_vmap_decrement_nesting")
KEY = "FuncTorchBatchedDecomposition"  # under which vmap looks for decompositions
RULES: list[Any] = []  # registrations, which end with their last reference


def level_part(path: str) -> Any:
    """Find a function of torch's vmap; where it is gone, code that needs it is refused."""
    return find_or(refusing("tdc.batch and lanes"), path, feature="one level of vmap by hand", lost="tdc.batch")


add_batch_dim: Any = level_part("torch._functorch.vmap:_add_batch_dim")
remove_batch_dim: Any = level_part("torch._functorch.vmap:_remove_batch_dim")
interpreter: Any = level_part("torch._functorch.pyfunctorch:retrieve_current_functorch_interpreter")
maybe_level: Any = level_part("torch:_C._functorch.maybe_get_level")
level_of_vmap: Any = level_part("torch._functorch.vmap:vmap_increment_nesting")


def level_of(x: Tensor) -> int:
    """Level at which a tensor is batched; -1 at none."""
    found: int = maybe_level(x)
    return found


def current_level() -> int:
    """Number of the innermost level, of `vmap` or of another transform. Can be traced."""
    found: int = interpreter().level()
    return found


def outside() -> Any:
    """A context without the innermost level: random numbers are drawn once, sizes may be read. Can be traced."""
    return interpreter().lower()


def physical(x: Tensor, level: int) -> Tensor:
    """Tensor of all examples, in its first dim, behind one that `is_batched` at a level."""
    found: Tensor = remove_batch_dim(x, level, 0, 0)
    return found


def mapped(x: Tensor, level: int) -> Tensor:
    """Tensor of one example, from that of all, in its first dim."""
    found: Tensor = add_batch_dim(x, 0, level)
    return found


# -- rules


def lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    of_input, of_state = F.linear(input, w_ih, b_ih).chunk(3, -1), F.linear(hx, w_hh, b_hh).chunk(3, -1)
    r, z = [(a + b).sigmoid() for a, b in zip(of_input[:2], of_state[:2], strict=True)]
    n = (of_input[2] + r * of_state[2]).tanh()
    return n + z * (hx - n)


def plain_cell(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return act(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


def folded(x: Tensor, level: int, count: int, dim: int) -> Tensor:
    """Tensor of all examples, folded into a dim of one example's."""
    whole = physical(x, level) if level_of(x) == level else x.expand(count, *x.shape)
    return whole.movedim(0, dim).flatten(dim, dim + 1)


def layers(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make the rule of recurrent layers: examples are more sequences."""

    def rule(input: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
        level, dim = current_level(), 0 if settings[-1] else 1
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        if any(level_of(x) == level for x in params):
            got, hint = "other weights for each example", f"nn.{name.upper()}Cell in a loop, or tdc.stack_modules"
            raise UnsupportedError(message("batch", "layers whose weights all examples share", got, hint=hint))
        count = next(physical(x, level).shape[0] for x in (input, *states) if level_of(x) == level)
        x, states = folded(input, level, count, dim), [folded(h, level, count, 1) for h in states]
        out, *ends = op(x, states[0] if isinstance(hx, Tensor) else states, params, *settings)
        found = [(out, dim), *[(end, 1) for end in ends]]
        return tuple([mapped(x.unflatten(d, (count, -1)).movedim(d, 0), level) for x, d in found])

    return rule


def attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rule of attention on CPU, of (N, H, T, D): examples are more of N."""
    level = current_level()
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    count = next(physical(x, level).shape[0] for x in given if level_of(x) == level)
    q, k, v = [folded(x, level, count, 0) for x in (query, key, value)]
    mask = attn_mask
    if mask is not None and (mask.ndim > 2 or level_of(mask) == level):
        mask = mask if mask.ndim > 2 else mask[None, None]
        mask = folded(mask.expand(query.shape[0], *mask.shape[1:]), level, count, 0)
    found = fused_cpu_forward(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)
    out, weights = [mapped(x.unflatten(0, (count, -1)), level) for x in found]
    return out, weights


RULES_OF: dict[str, Callable[..., Any]] = {
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "rnn_tanh_cell": plain_cell(torch.tanh),
    "rnn_relu_cell": plain_cell(torch.relu),
    "lstm.input": layers(torch.ops.aten.lstm.input, "lstm"),
    "gru.input": layers(torch.ops.aten.gru.input, "gru"),
    "rnn_tanh.input": layers(torch.ops.aten.rnn_tanh.input, "rnn"),
    "rnn_relu.input": layers(torch.ops.aten.rnn_relu.input, "rnn"),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
}


def register_rules() -> None:
    """Register the rules that vmap lacks."""
    known = [name for name in RULES_OF if fused_cpu_forward is not None or RULES_OF[name] is not attention]
    missing = [name for name in known if not any(has_kernel(name, key) for key in (KEY, "FuncTorchBatched"))]
    if missing:
        rules = torch.library.Library("aten", "IMPL", KEY)
        for name in missing:
            rules.impl(name, RULES_OF[name])
        RULES.append(rules)


# -- levels by hand


def map_lanes(fn: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], count: int) -> tuple[list[Any], list[bool]]:
    """Run `fn` for each of `count` examples, the first dim of tensors; return the results, and which are batched."""
    given: list[Tensor] = []
    found: list[Any] = []
    mapped: list[bool] = []
    with level_of_vmap(count, "different") as level:
        for x in tensors:  # loops, not comprehensions: a graph is traced through them faster
            given.append(add_batch_dim(x, 0, level))
        for x in fn(*given):
            mapped.append(isinstance(x, Tensor) and is_batched(x))
            found.append(remove_batch_dim(x, level, count, 0) if mapped[-1] else x)
    return found, mapped


@optional("vmap in loops exported", lost="exports of tdc.batch with loops", instead=nullcontext)
def levels_in_loops() -> AbstractContextManager[Any]:
    """A context: torch.export accepts nodes in loops that begin and end a level (torch 2.13)."""
    check = find("torch._export.verifier:_check_val")

    def checked(node: Any) -> None:
        if getattr(node.target, "__name__", "") in NESTING:
            node.meta.setdefault("val", None)
        check(node)

    return patched((find("torch._export.verifier"), "_check_val", checked))


@cache
def load_decompositions() -> None:
    """Load torch's decompositions for vmap, as its first vmap does, and register ours."""
    with scripting():
        torch.vmap(torch.neg)(torch.zeros(1))
    register_rules()
    keep_levels()


@optional("levels of vmap kept in exports", lost="exports of tdc.batch with loops", instead=nothing)
def keep_levels() -> None:
    """Keep torch.export from dropping the ends of levels in loops (torch 2.13)."""
    for name in NESTING:
        has_side_effect(find(f"torch._functorch.predispatch:{name}"))


def has_hooks(module: torch.nn.Module) -> bool:
    """True if a module has hooks. Can be traced."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
