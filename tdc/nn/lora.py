"""LoRA as functions of TensorDicts.

    adapters = lora_init(params, rank=8)                    two small matrices for each weight; their product is 0
    merged = lora_merge(params, adapters)                   weight + scale * b @ a
    loss = loss_of(functional_call(net, merged, (x,)))      differentiate, train and save the adapters only

    weight (*k, out, *features)      a (*k, rank, prod(features))      b (*k, out, rank)      k batch dims

Invariant: parameters without adapters are the same objects in the merged ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_at_least, expect_number
from tdc.core.errors import KeyPathError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, path_of, show
from tdc.core.typing import KeyPath
from tdc.tensordict.combine import Select, check_select, chosen
from tdc.tensordict.nodes import Static
from tdc.tensordict.tensordict import TensorDict, build_td


def lora_init(
    params: TensorDict, rank: int = 8, *, alpha: float | None = None, select: Select = "*weight", seed: int = 0
) -> TensorDict:
    """Make adapters for weights of a model, in their dtypes. Their product is 0, since one factor is 0.

    Shapes:
        weight `(*batch_size, out, *features)` -> `a` `(*batch_size, rank, prod(features))`, `b` `(*batch_size, out,
        rank)`.

    Args:
        rank: of the product.
        alpha: the product is scaled by `alpha / rank`, or 1 if alpha is None.
        select: leaves to adapt: a glob on the key with dots, a list of them, or a function of key and leaf. Leaves of
            less than two dims, such as biases, are skipped.
        seed: of the random factor.

    Returns:
        A TensorDict with the keys of the weights: `{weight: {"a": …, "b": …, "scale": Static(…)}}`.

    Raises:
        ShapeError: a rank below 1.
        KeyPathError: no leaf of two dims is selected.

    Example:
        >>> params = TensorDict({"fc": {"weight": torch.ones(4, 3), "bias": torch.ones(4)}})
        >>> adapters = lora_init(params, rank=2, alpha=4)
        >>> adapters["fc", "weight", "a"].shape, adapters["fc", "weight", "b"].shape, adapters["fc", "weight", "scale"]
        (torch.Size([2, 3]), torch.Size([4, 2]), 2.0)

    Source:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022; initialized as its authors do.
    """
    op = "nn.lora_init"
    expect(op, params, TensorDict, of=" of parameters")
    expect_at_least(op, 1, "rank", rank)
    expect_number(op, *[] if alpha is None else [alpha])
    expect_number(op, seed, whole=True)
    check_select(op, select)
    k, leaves = params.ndim, params._leaves
    flags = chosen(leaves, select)
    weights = {p: x for (p, x), flag in zip(leaves.items(), flags, strict=True) if flag and is_weight(x, k)}
    if not weights:
        some = ", ".join([repr(show(p)) for p, x in leaves.items() if is_weight(x, k)][:5]) or "none"
        raise KeyPathError(message(op, "weights to adapt", "no leaf of two dims", hint=f"there are {some}"))
    generator = torch.Generator().manual_seed(seed)
    entries: dict[Any, Any] = {}
    for path, x in weights.items():
        wide, size = math.prod(x.shape[k + 1 :]), x.shape[:k]
        a = (torch.rand(*size, rank, wide, generator=generator) * 2 - 1) / math.sqrt(max(wide, 1))
        entries[*parts(path), "a"] = a.to(x)
        entries[*parts(path), "b"] = x.new_zeros((*size, x.shape[k], rank))
        entries[*parts(path), "scale"] = Static(1.0 if alpha is None else float(alpha) / rank)
    return TensorDict(entries, params.batch_size)


def is_weight(x: Any, k: int) -> bool:
    """True for a floating-point tensor of at least two feature dims."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim - k > 1


def lora_merge(params: TensorDict, adapters: TensorDict) -> TensorDict:
    """Add the products of adapters to parameters.

    Args:
        params: of the model.
        adapters: of `lora_init`.

    Returns:
        Parameters of the same keys, shapes and dtypes.

    Raises:
        StructureError: adapters for weights that params does not have, or of other shapes; all are named.

    Compile:
        fullgraph, differentiable in both; vmap over adapters, over parameters, or both.

    Example:
        >>> params = TensorDict({"fc": {"weight": torch.ones(4, 3), "bias": torch.ones(4)}})
        >>> merged = lora_merge(params, lora_init(params, rank=2))
        >>> torch.equal(merged["fc", "weight"], params["fc", "weight"]), merged["fc", "bias"] is params["fc", "bias"]
        (True, True)
    """
    return changed("nn.lora_merge", params, adapters, lambda x, product: x + product)


def lora_unmerge(params: TensorDict, adapters: TensorDict) -> TensorDict:
    """Undo `lora_merge` of these adapters, up to rounding.

    Raises:
        StructureError: as `lora_merge`.

    Example:
        >>> params = TensorDict({"weight": torch.ones(4, 3)})
        >>> adapters = lora_init(params, rank=2)
        >>> torch.equal(lora_unmerge(lora_merge(params, adapters), adapters)["weight"], params["weight"])
        True
    """
    return changed("nn.lora_unmerge", params, adapters, lambda x, product: x - product)


def changed(op: str, params: TensorDict, adapters: TensorDict, fn: Callable[[Tensor, Tensor], Tensor]) -> TensorDict:
    """`fn` of each adapted weight and its product, rounded once."""
    expect(op, params, TensorDict, of=" of parameters")
    expect(op, adapters, TensorDict, of=" of adapters")
    factors = pairs_of(op, params, adapters)
    leaves = dict(params._leaves)
    for path, (a, b, scale) in factors.items():
        x = leaves[path]
        product = (b @ a * scale).reshape(x.shape)
        leaves[path] = fn(x.to(product.dtype), product).to(x.dtype) if x.dtype != product.dtype else fn(x, product)
    return build_td(leaves, params._nodes, params._size, params._device)


def pairs_of(op: str, params: TensorDict, adapters: TensorDict) -> dict[KeyPath, tuple[Any, Any, float]]:
    """Factors and scale of each weight."""
    own, found, wrong = adapters._leaves, {}, {}
    for path in dict.fromkeys([path_of(parts(p)[:-1]) for p in own]):
        x, a, b = params._leaves.get(path), own.get((*parts(path), "a")), own.get((*parts(path), "b"))
        scale: Any = adapters.get((*parts(path), "scale"), None)
        if x is None or a is None or b is None or not isinstance(scale, float):
            wrong[show(path)] = "no weight of params" if x is None else "without a, b and scale"
        elif not fit(x.shape, a.shape, b.shape, params.ndim):
            wrong[show(path)] = f"a {describe(a)}, b {describe(b)}, weight {describe(x)}"
        else:
            found[path] = (a, b, scale)
    hint = "make them with lora_init of these parameters"
    refuse_wrong(StructureError, op, "adapters of these params", wrong, "that do not fit", hint)
    return found


def fit(weight: Any, a: Any, b: Any, k: int) -> bool:
    """True if the shapes of two factors fit a weight of k batch dims."""
    if len(weight) < k + 2 or len(a) != k + 2 or len(b) != k + 2:
        return False
    inner = math.prod(weight[k + 1 :])
    return a[:k] == b[:k] == weight[:k] and (b[k], b[k + 1], a[k + 1]) == (weight[k], a[k], inner)
