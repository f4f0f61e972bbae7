"""Autograd functions and operators at one level of `torch.func` (torch 2.11-2.15).

In `vmap(grad(f))` an operator comes down from grad to vmap to none, through its kernel for autograd where a level
differentiates. `torch.autograd.Function.apply` begins again at the top; Dynamo traces it under no `vmap`, and leaves
its derivative out of derivatives of derivatives. So under a transform a program calls the operator, see
`core/operators.py`.

Invariant: with `core/dynamo.py`, the place in `core` that names private parts of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tdc.core.dynamo import is_batched, never, skipped_in_graphs, under_transform, unwrapped
from tdc.core.errors import refusing
from tdc.core.private import find, find_or, nothing, optional

untyped: Any = forward_ad  # whose types are open
LOST = "derivatives of the operators of this library"


def needed(path: str, feature: str) -> Any:
    """Return an object of torch without which derivatives would be wrong: where it is gone, calls are refused."""
    return find_or(refusing(feature), path, feature=feature, lost=LOST)


alone = needed("torch._functorch.utils:enable_single_level_autograd_function", "autograd functions at one level")
forward_mode = needed("torch:autograd.forward_ad._set_fwd_grad_enabled", "forward-mode derivatives at one level")
unwrap_dead: Callable[[Any], Any] = find_or(
    tuple, "torch._functorch.utils:unwrap_dead_wrappers", feature="dead wrappers", lost="use of vmapped results outside"
)
below_views: Callable[[], Any] = find_or(
    nullcontext, "torch:_C._AutoDispatchBelowADInplaceOrView", feature="operations unrecorded", lost="speed of kernels"
)
unpack_dual: Callable[..., Any] = find_or(
    untyped.unpack_dual, "torch:_VF._unpack_dual", feature="tangents unpacked fast", lost="speed of eager calls"
)
is_excluded: Callable[[str], bool] = find_or(
    never, "torch:_C._dispatch_tls_is_dispatch_key_excluded", feature="kernels told", lost="speed of kernels"
)
is_legacy_batched: Callable[[Any], bool] = find_or(
    never, "torch:_C._functorch.is_legacy_batchedtensor", feature="is_grads_batched", lost="is_grads_batched"
)


def below_autograd(op: Any, keys: Any, *args: Any) -> Any:
    """Run an operation below autograd; `keys` is the dispatch key set that its kernel for autograd was given."""
    after = keyset_after_autograd()
    found: Tensor | tuple[Tensor, ...] | list[Tensor]
    if after is None:
        with find("torch:_C._AutoDispatchBelowAutograd")():
            found = op(*args)
    else:
        found = op.redispatch(keys & after, *args)
    return tuple(found) if isinstance(found, list) else found  # as autograd functions return several


@cache
@optional("operators below autograd by keys", lost="speed of kernels", instead=nothing)
def keyset_after_autograd() -> Any:
    """torch's dispatch keys behind autograd; None where torch does not name them."""
    return find("torch:_C._after_autograd_keyset")


def applied(function: Any, *inputs: Any) -> Any:
    """`function.apply(*inputs)` of all inputs by position, without a look at its signature where no transform is."""
    if under_transform():
        return function.apply(*inputs)
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*unwrap_dead(inputs))


def at_level(function: Any, inputs: tuple[Any, ...], below: Callable[[], Any]) -> Any:
    """The results of `below()`, with the derivatives that an autograd function of the same inputs gives them."""
    with alone():
        return level_of(function).apply(*inputs, below)


@cache
@optional("derivatives at one level", lost=LOST, instead=refusing("derivatives at one level"))
def level_of(function: Any) -> Any:
    """An autograd function for one level; the last of its inputs gives its results."""

    class Level(find("torch:autograd.function._SingleLevelFunction")):  # type: ignore[misc]  # without types
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with torch.enable_grad(), forward_mode(True):  # of levels below
                return inputs[-1]()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            function.setup_context(ctx, inputs[:-1], output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *function.backward(ctx, *grads), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return also_below(function.jvp)(ctx, *tangents[:-1])

    return Level


def also_below(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `jvp` of an autograd function, whose tangents would silently lack those of levels below."""

    def run(ctx: Any, *tangents: Any) -> Any:
        with forward_mode(True):
            return jvp(Still(ctx), *tangents)

    return run


class Still:
    """The context of an autograd function, whose tensors have no tangent at this level."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple([t if t is None else still(t) for t in self.ctx.saved_tensors])


def still(x: Tensor) -> Tensor:
    """A tensor without its tangent at this level."""
    if is_batched(x):  # `vmap` has no rule for the operation
        dim, level = [find(f"torch:_C._functorch.maybe_get_{name}")(x) for name in ("bdim", "level")]
        found: Tensor = find("torch:_C._functorch._add_batch_dim")(still(unwrapped(x)), dim, level)
    else:
        found = unpack_dual(x, level=0)[0]
    return found


@contextmanager
def recording() -> Generator[None]:
    """A context in which autograd records inside a kernel, also where torch runs a graph below autograd."""
    with torch.enable_grad(), autograd_on():
        yield


@optional("gradients inside a kernel", lost=LOST, instead=refusing("gradients inside a kernel"))
def autograd_on() -> Any:
    """A context in which autograd records, below its own dispatch key, too."""
    keys, exclude = find("torch:_C.DispatchKey"), find("torch:_C._dispatch_tls_local_exclude_set")()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    return find("torch:_C._ForceDispatchKeyGuard")(find("torch:_C._dispatch_tls_local_include_set")(), exclude)


def unrecorded() -> Any:
    """A context for operations on new tensors of a kernel, without the book-keeping of views and versions."""
    return below_views()


def in_forward_mode() -> bool:
    """True within a level of forward-mode AD, of `torch.func` or made by hand."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


@skipped_in_graphs
def moving(args: Iterable[Any]) -> list[Tensor]:
    """Tensors with a forward-mode tangent."""
    if not in_forward_mode() and not under_transform():  # as a rule, and to ask takes 4 us
        return []
    if is_excluded("ADInplaceOrView"):  # inside a kernel
        return []
    return [a for a in args if isinstance(a, Tensor) and unpack_dual(a, level=0)[1] is not None]


def mapped(tensors: Iterable[Tensor]) -> bool:
    """True if one is batched by `torch.autograd.grad(is_grads_batched=True)`, which no kernel can write to."""
    return any([is_legacy_batched(t) for t in tensors])


@optional("errors of second derivatives", lost="a check", instead=lambda *args: args[1])
def delayed_error(text: str, outs: tuple[Tensor, ...], learns: Tensor) -> tuple[Tensor, ...]:
    """The same results, whose derivative raises a RuntimeError of this text, also where `torch.func` is traced."""
    found: tuple[Tensor, ...] = find("torch:_C._functions.DelayedError")(text, 1 + len(outs))(*outs, learns)
    return found[:-1]
