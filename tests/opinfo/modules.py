"""torch's own samples of modules as batches: constructor variants of `module_db` against the loop over examples.

    python tests/opinfo/modules.py                     counts of all modules, training and evaluating
    python tests/opinfo/modules.py --modules Conv -v   some, with the text of what differs, is refused or not mapped

A sample is drawn three times. Where its dim 0 is a batch (convolution, pooling, statistics of channels, class
targets), an example is what that dim holds; elsewhere the sample itself is an example. One dim of the input is ragged;
tensors that have it, too, are cut with it. What pools over the batch (batch norm, losses with a reduction) is compared
with the module on all examples joined along the ragged dim. Buffers are compared afterwards.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opinfo import compare
from opinfo.mapping import NotMapped, join
from torch_samples import forget_callers

import tdc

forget_callers()

KINDS = ("nested", "masked")
COUNT = 3
CHANNELS = re.compile("Conv|Pool|BatchNorm|InstanceNorm|Pad\\dd|GroupNorm|LocalResponseNorm|Softmax2d|PReLU")
RECURRENT = re.compile("^(RNN|GRU|LSTM)$")
ATTENTION = re.compile("Transformer|MultiheadAttention")
CLASSES = re.compile("^(CrossEntropy|NLL)Loss$")
REASONS = {  # modules none of whose samples is a batch of examples of different sizes
    "LinearCrossEntropyLoss": "has no rule: a linear layer and cross_entropy",
    "CTCLoss": "takes lengths that ragged batches know, and frames as (T, N, C)",
    "RNNCell": "is one step of a batch", "GRUCell": "is one step of a batch", "LSTMCell": "is one step of a batch",
}  # fmt: skip


@dataclass
class Case:
    """One sample of a module, drawn three times.

    Attributes:
        alone: the module for one example: the same, with dims of an example.
        batched: whether dim 0 of its tensors is a batch already, of which each draw gives one example.
        dim: the ragged dim of the input, counted without the batch.
        lengths: sizes of the three examples along it: equal ones where a window takes no shorter example.
    """

    name: str
    module: nn.Module
    alone: nn.Module
    examples: list[tuple[list[Any], dict[str, Any]]]
    batched: bool
    dim: int
    lengths: tuple[int, ...]


def samples(info: Any, training: bool, dtype: torch.dtype = torch.float64) -> Iterator[list[Any]]:
    """Each constructor variant, three times with other numbers."""
    columns = []
    for seed in range(COUNT):
        torch.manual_seed(seed)
        columns.append(info.module_inputs_func(info, "cpu", dtype, False, training=training))
    yield from (list(column) for column in zip(*columns, strict=True))


def built(info: Any, sample: Any, training: bool, shift: int = 0) -> nn.Module:
    """The module of a sample; the batch comes first, and dims are counted behind it.

    Raises:
        NotMapped: it draws random numbers of its own.
    """
    args, kwargs = list(sample.constructor_input.args), dict(sample.constructor_input.kwargs)
    cls = info.module_cls
    names = list(inspect.signature(cls).parameters)
    if "dim" in names and shift:
        at = names.index("dim")
        given = args[at] if at < len(args) else kwargs.get("dim")
        if isinstance(given, int) and given >= 0:
            args, kwargs = [a for i, a in enumerate(args) if i != at], {**kwargs, "dim": given + shift}
    torch.manual_seed(9)
    module = cls(*args, **kwargs).to(torch.float64).train(training)
    for part in module.modules():
        if hasattr(part, "batch_first"):
            part.batch_first = True
    if training and any(getattr(m, "p", 0.0) for m in module.modules() if isinstance(m, nn.Dropout)):
        raise NotMapped("draws random numbers")
    return module


def cases(info: Any, draws: list[Any], training: bool) -> Iterator[Case]:
    """A sample with each of its dims ragged.

    Raises:
        NotMapped: it has none, or is no sample of examples.
    """
    name = info.module_cls.__name__
    calls = [([*d.forward_input.args], dict(d.forward_input.kwargs)) for d in draws]
    named = [k for k in ("input",) if k in calls[0][1]]
    calls = [([kwargs.pop(k) for k in named] + args, kwargs) for args, kwargs in calls]
    first = calls[0][0][0]
    if name in REASONS:
        raise NotMapped(REASONS[name])
    if any(v is not None and re.search("padding_mask", k) for k, v in calls[0][1].items()):
        raise NotMapped("says by a mask which positions are real")
    known = inspect.signature(info.module_cls.forward).parameters
    for key in ("is_causal", "src_is_causal", "tgt_is_causal") if name.startswith("Transformer") else ():
        if key in known:  # otherwise torch looks into the mask, for the size of a dim that has many
            calls = [(args, {key: False, **kwargs}) for args, kwargs in calls]
    per_channel = name != "PReLU" or first.ndim > 1
    spatial = re.search(r"(\d)d$", name)
    n = int(spatial.group(1)) if spatial else 0
    batched = bool(CHANNELS.search(name)) and per_channel and (not n or first.ndim == n + 2 or "BatchNorm" in name)
    batched = batched or (bool(CLASSES.search(name)) and first.ndim > 2)
    unbatched = (ATTENTION.search(name) or RECURRENT.search(name)) and first.ndim == 3
    if batched or unbatched:
        if not first.shape[0]:
            raise NotMapped("has no example")
        states = bool(RECURRENT.search(name))
        calls = [(one_example(a, states), {k: one_mask(k, v) for k, v in kw.items()}) for a, kw in calls]
    first = calls[0][0][0]
    free = range(1 if batched or n else 0, first.ndim)
    if ATTENTION.search(name) or RECURRENT.search(name) or (CLASSES.search(name) and not batched):
        free = range(min(first.ndim, 1))
    if not free:
        raise NotMapped("has no dim that may be ragged")
    module = alone = built(info, draws[0], training)
    if "dim" in inspect.signature(info.module_cls).parameters:
        module = built(info, draws[0], training, 1)
    for dim in free:
        size = first.shape[dim]
        whole = ((size,) * COUNT,) if batched else ()
        for lengths in ((size, min(size, 1), (size + 1) // 2), (size, max(size - 1, 0), size), *whole):
            examples = [cut(c, dim, size, k, batched) for c, k in zip(calls, lengths, strict=True)]
            case = Case(name, module, alone, examples, batched, dim, lengths)
            if accepted(case):
                yield case
                break


def one_example(args: list[Any], states: bool) -> list[Any]:
    """The first example of a batch; states behind the first have it at dim 1."""
    first = pytree.tree_map(lambda t: t[0], args[:1])
    at = int(states)
    return first + pytree.tree_map(lambda t: t.select(at, 0) if isinstance(t, Tensor) else t, args[1:])


def one_mask(name: str, value: Any) -> Any:
    """A mask is for all examples."""
    return value if "mask" in name or not isinstance(value, Tensor) else value[0]


def cut(
    call: tuple[list[Any], dict[str, Any]], dim: int, size: int, length: int, batched: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The tensors of an example that have the ragged dim, cut to a length; masks in both dims."""

    def positional(t: Any) -> Any:
        at = position(t, call[0][0], dim, batched)
        has = isinstance(t, Tensor) and 0 <= at < t.ndim and t.shape[at] == size
        return t.narrow(at, 0, length) if has else t

    def by_name(t: Any) -> Any:
        return t[..., :length, :length] if isinstance(t, Tensor) and t.ndim > 1 else t

    args, kwargs = call
    return [positional(a) for a in args], {k: by_name(v) for k, v in kwargs.items()}


def position(t: Any, first: Tensor, dim: int, batched: bool) -> int:
    """Where a tensor has the ragged dim of the first: class targets lack the channels in front of it."""
    return dim - first.ndim + t.ndim if batched and isinstance(t, Tensor) else dim


def accepted(case: Case) -> bool:
    """Whether torch takes each example; makes lazy parameters."""
    try:
        for args, kwargs in case.examples:
            alone(case, {} if lazy(case.module) else copies(case.module.named_buffers()), args, kwargs)
    except Exception:
        return False
    return True


def alone(case: Case, buffers: dict[str, Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What the module gives for one example; the buffers change."""
    if not case.batched:
        return run(case.alone, buffers, args, kwargs)
    one = [a[None] if isinstance(a, Tensor) else a for a in args]
    return pytree.tree_map(lambda t: t[0] if t.ndim else t, run(case.alone, buffers, one, kwargs))


def lazy(module: nn.Module) -> bool:
    """Whether the sizes of parameters come from the first input."""
    return any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters())


def copies(buffers: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in buffers}


def run(module: Any, buffers: dict[str, Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A call that changes the given buffers."""
    if not buffers:
        return module(*args, **kwargs)
    return torch.func.functional_call(module, buffers, tuple(args), kwargs)


def joined(case: Case, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the batch."""
    columns = list(zip(*[args for args, _ in case.examples], strict=True))
    shared, found = dict[str, Any](), []
    for column in columns:
        t, at = column[0], position(column[0], columns[0][0], case.dim, case.batched)
        if RECURRENT.search(case.name) and column is not columns[0]:
            found.append(pytree.tree_map(lambda *states: torch.stack(states, 1), *column))
        elif not isinstance(t, Tensor):
            found.append(t)
        elif 0 <= at < t.ndim and tuple(x.shape[at] for x in column) == case.lengths:
            found.append(join(list(column), at, kind, "nan", shared))
        else:
            found.append(torch.stack(column))
    masks = max(
        [kwargs for _, kwargs in case.examples],
        key=lambda kw: sum(v.numel() for v in kw.values() if isinstance(v, Tensor)),
    )
    return found, masks


def together(case: Case) -> Any:
    """What the module gives for all examples, joined along the ragged dim."""
    columns = list(zip(*[args for args, _ in case.examples], strict=True))
    shapes, ready = [t.shape for t in columns[0]], []
    for column in columns:
        parts = list(column)
        if isinstance(parts[0], Tensor):
            at = position(parts[0], columns[0][0], case.dim, case.batched)
            if at >= parts[0].ndim or parts[0].shape[at] != case.lengths[0]:
                parts = [t.expand(shape) for t, shape in zip(parts, shapes, strict=True)]
            ready.append(torch.cat(parts, at)[None] if case.batched else torch.cat(parts, at))
        else:
            ready.append(parts[0])
    return ready


def outcome(case: Case, kind: str) -> tuple[str, str]:
    """What becomes of a sample in one kind, and the text."""
    leaves = [t for args, kw in case.examples for t in pytree.tree_leaves((args, kw)) if isinstance(t, Tensor)]
    leaves = [t for t in leaves if t.is_floating_point()]
    leaves = [args[0] for args, _ in case.examples] if case.name == "SoftMarginLoss" else leaves  # not of targets
    params = [p for p in case.module.parameters() if p.requires_grad]
    roots = [t.detach().clone().requires_grad_() for t in leaves]
    known = dict(zip([id(t) for t in leaves], roots, strict=True))
    swap = lambda x: pytree.tree_map(lambda t: known.get(id(t), t), x)  # noqa: E731
    case = replace(case, examples=[swap(c) for c in case.examples])
    before = copies(case.module.named_buffers())
    args, kwargs = joined(case, kind)
    ours = copies(before.items())
    try:
        with sdpa_kernel(SDPBackend.MATH):
            got = run(case.module, ours, args, kwargs)
    except tdc.TdcError as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        return "raw", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    try:
        text = difference(case, got, before, ours, [*roots, *params])
    except Exception as error:
        return "differs", f"{type(error).__name__}: {error}"
    return ("differs", text) if text else ("pass", "")


def difference(case: Case, got: Any, before: dict[str, Tensor], ours: dict[str, Tensor], leaves: list[Tensor]) -> str:
    """The first difference of results, gradients and buffers."""
    reduction = getattr(case.module, "reduction", "none")
    theirs = copies(before.items())
    if reduction != "none":
        want = run(case.module, theirs, together(case), {})
        scale = sum(case.lengths) / COUNT if reduction == "batchmean" and case.dim == 0 else 1.0
        scale = case.examples[0][0][0].shape[0] / COUNT if reduction == "batchmean" and case.dim else scale
        found = [("result", got, want * scale)]
    elif isinstance(case.module, nn.modules.batchnorm._BatchNorm):
        want = run(case.module, theirs, together(case), {})[0].split(case.lengths, case.dim)
        found = list(compare.pairs("", got, list(want)))
    else:
        want, changed = [], []
        for args, kwargs in case.examples:
            after = copies(before.items())
            want.append(alone(case, after, args, kwargs))
            changed.append(after)
        theirs = {k: torch.stack([c[k] for c in changed]).double().mean(0).to(b.dtype) for k, b in before.items()}
        moved = pytree.tree_map(
            lambda t: t.movedim(1, 0) if isinstance(t, Tensor) and RECURRENT.search(case.name) else t, got,
            is_leaf=compare.is_batch,
        )  # fmt: skip
        found = list(compare.pairs("", moved, want))
    text = compare.values(found, leaves) or compare.gradients(found, leaves, 1)
    for k, b in ours.items():
        text = text or (compare.differ(b, theirs[k]) and f"buffer {k}: {compare.differ(b, theirs[k])}")
    return text


def outcomes(
    info: Any, training: bool, kinds: tuple[str, ...] = KINDS, limit: int = 10**6
) -> Iterator[tuple[str, ...]]:
    """(module, sample, mode, kind, dim, outcome, text) of each call."""
    name, mode = info.module_cls.__name__, "train" if training else "eval"
    for number, draws in enumerate(samples(info, training)):
        if number >= limit:
            return
        try:
            found = list(cases(info, draws, training))
        except NotMapped as reason:
            yield name, str(number), mode, "", "", "unmapped", str(reason)
            continue
        if not found:
            yield name, str(number), mode, "", "", "unmapped", "torch refuses an example"
        for case in found:
            for kind in kinds:
                yield name, str(number), mode, kind, str(case.dim), *outcome(case, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default="", help="a pattern of names")
    parser.add_argument("--limit", type=int, default=10**6, help="samples of each module")
    parser.add_argument("-v", action="store_true", help="print what differs, raises errors, is refused or not mapped")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, texts = Counter[str](), Counter[tuple[str, str, str]]()
    for info in module_db:
        if re.search(given.modules, info.module_cls.__name__):
            for training in (True, False):
                for name, number, mode, kind, dim, result, text in outcomes(info, training, limit=given.limit):
                    counts[result] += 1
                    texts[name, result, text[:120]] += result != "pass"
                    if given.v and result in ("raw", "differs"):
                        print(name, number, mode, kind, dim, result, text, sep=" | ", flush=True)
    for (name, result, text), n in sorted(texts.items()):
        if n and (given.v or result in ("unmapped", "refused")):
            print(n, name, result, text, sep=" | ")
    print(dict(counts))


if __name__ == "__main__":
    main()
