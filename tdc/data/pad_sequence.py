"""Examples of different length as one batch, padded or ragged, and the way back.

    pad_sequence([td0, td1])       leaves with a dim to pad become MaskedBatches, the others are stacked
    ragged_stack([td0, td1])       the same with NestedTensors
    unpad_sequence(td)             the list of examples

What a leaf becomes follows from its name and its number of dims, never from sizes that happen to differ: a batch of
examples of equal length has the types of any other batch.

Invariants:
  - `unpad_sequence(pad_sequence(tds))` has the leaves of `tds`, and their batch sizes where leaves show them; the same
    is true of `ragged_stack`;
  - leaves whose examples have the same lengths share one structure, so that they combine without a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_number, keys_of
from tdc.core.container import Container
from tdc.core.errors import (
    DtypeError,
    KeyPathError,
    ShapeError,
    StructureError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
)
from tdc.core.keys import as_path, show
from tdc.core.typing import Dims, KeyPath, NestedKey, OpName
from tdc.interop.records import as_tensordict, batch_of, has_fields
from tdc.layout.padding import shift_rows
from tdc.ragged.convert import to_padded
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.pack import pack
from tdc.tensordict.mapping import existing_path
from tdc.tensordict.nodes import Nodes, statics, without_extra
from tdc.tensordict.paths import depth, within
from tdc.tensordict.shared import Shared, check_equal, seated, without_shared
from tdc.tensordict.storage import Leaves, check_leaves, is_tensordict, mark_examples, same_keys, together
from tdc.tensordict.tensordict import TensorDict, build_td

Convert = Callable[[KeyPath, NestedTensor], Any]


def pad_sequence(
    tds: Sequence[Any],
    dim: int = 0,
    value: Any = 0,
    side: str = "right",
    *,
    keys: Iterable[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> TensorDict:
    """Stack TensorDicts that differ in length along `dim`, padded to the longest.

    Shapes:
        leaves `[(*S0, L_i, *S1), ...] -> MaskedBatch (B, *S0, L, *S1)`; leaves without dim `dim` are stacked. The batch
        size is `(B, *S0)` where `S0` are batch dims of the examples: with `dim=0` it is `(B,)`.

    Args:
        tds: at least one; TensorDicts with the same keys, or mappings and records of tensors. `dim` counts their dims.
        value: what padding holds, or a dict of it by key, 0 for the others; the value of an inner node is for all
            leaves below. No operation relies on it.
        side: "right" puts padding behind each example, "left" in front of it, as models that generate need it. A
            MaskedBatch has its padding behind, so on the left a leaf is a plain tensor: ask for the mask, and
            `tdc.from_padded(tensor, mask=mask, side="left")` is the way back.
        keys: only these leaves are padded, all others are stacked. None pads every leaf that has dim `dim`, also where
            all examples happen to have the same size.
        mask_key: where masks go: bool (B, *S0, L), True where an element is real, one for each padded leaf by its key.

    Raises:
        StructureError: no examples, other keys or other Static values in one of them.
        ShapeError: leaves that differ in another dim; every key is named. Another side.
        DtypeError: leaves to pad that are no tensors, or differ in dtype; all are named. A value that is no number.
        KeyPathError: a key that is not there; a `mask_key` that is.

    Compile:
        Traceable, the number of examples fixed.

    Example:
        >>> tds = [TensorDict({"x": torch.ones(n, 2), "y": torch.tensor(n)}) for n in (1, 3)]
        >>> batch = pad_sequence(tds)
        >>> batch["x"].shape, batch["x"].lengths.tolist(), batch["y"]
        (torch.Size([2, 3, 2]), [[1], [3]], tensor([1, 3]))

    Source:
        `torch.nn.utils.rnn.pad_sequence`.
    """
    examples = examples_of("data.pad_sequence", tds)
    check_choices("data.pad_sequence", examples[0], side, mask_key)
    fills = fills_of(examples[0], value)
    known: list[tuple[Any, MaskedBatch]] = []
    masks: dict[Any, Tensor] = {}

    def convert(path: KeyPath, packed: NestedTensor) -> MaskedBatch | Tensor:
        padded = pad(packed, fills.get(path, 0), known)
        if mask_key is not None:
            masks[path] = mask_of(padded, side)
        return padded if side == "right" else padded_left(padded)

    out = stack_along("data.pad_sequence", examples, dim, keys, convert)
    return out if mask_key is None else out.set(mask_key, masks)


def ragged_stack(
    tds: Sequence[Any], dim: int = 0, *, keys: Iterable[NestedKey] | None = None, strict: bool = True
) -> TensorDict:
    """Stack TensorDicts that differ in length along `dim`, without padding.

    Shapes:
        leaves `[(*S0, L_i, *S1), ...] -> NestedTensor (B, *S0, -1, *S1)`; leaves without dim `dim` are stacked.

    Args:
        strict: whether examples with different keys are an error; if not, those keys are stacked that all have.

    Other arguments, Raises and Compile as `pad_sequence`.

    Example:
        >>> tds = [TensorDict({"x": torch.ones(n, 2), "y": torch.tensor(n)}) for n in (1, 3)]
        >>> ragged_stack(tds)["x"].shape
        torch.Size([2, -1, 2])
    """
    examples = examples_of("data.ragged_stack", tds, strict)
    return stack_along("data.ragged_stack", examples, dim, keys, lambda path, packed: packed)


def unpad_sequence(td: TensorDict, *, batch_dims: int | None = None) -> list[TensorDict]:
    """The examples of a batch, each without padding: the inverse of `pad_sequence` and of `ragged_stack`.

    Args:
        batch_dims: how many leading dims of each example are its batch size, beyond those that the batch has. None
            takes the first dim of the examples where all leaves are ragged in it and have the same length in each
            example, as trajectories do whose batch size is their length. Leaves whose lengths agree by chance look the
            same: 0 says that the examples have no batch dims of their own.

    Raises:
        ShapeError: no batch dim to unbind, or leaves of an example that do not agree in these dims.

    Compile:
        Eager only: reads the lengths on the host.

    Example:
        >>> tds = [TensorDict({"x": torch.ones(n, 2)}, [n]) for n in (1, 3)]
        >>> [example.batch_size for example in unpad_sequence(pad_sequence(tds))]
        [torch.Size([1]), torch.Size([3])]
    """
    if not is_tensordict(td) or not td._size:
        got = "batch_size=[]" if is_tensordict(td) else type(td).__name__
        hint = "tdc.data.pad_sequence(tds)"
        raise ShapeError(message("data.unpad_sequence", "a TensorDict with a batch dim", got, hint=hint))
    if batch_dims is not None:
        expect_number("data.unpad_sequence", batch_dims, whole=True)
    examples: Any = torch.unbind(td, 0)  # type: ignore[arg-type]  # it dispatches
    if batch_dims is None:
        batch_dims = int(one_length(td, examples))
    if not batch_dims:
        return list(examples)
    out = []
    for x in examples:
        sizes = [batch_of(leaf)[: len(x._size) + batch_dims] for leaf in without_shared(x._leaves).values()]
        size = torch.Size(sizes[0] if sizes else x.batch_size)
        leaves = seated(x._leaves, x._nodes, size)
        check_leaves("data.unpad_sequence", leaves, x._nodes, size, "give fewer batch_dims")
        out.append(build_td(leaves, x._nodes, size, x.device))
    return out


# -- helpers


def one_length(td: TensorDict, examples: Sequence[TensorDict]) -> bool:
    """True if all leaves are ragged in the first dim of the examples, and have the same length there in each."""
    k = len(td._size)
    rows = without_shared(td._leaves)
    ragged = [isinstance(x, (NestedTensor, MaskedBatch)) and k in x.ragged_dims for x in rows.values()]
    lengths = [{x._leaves[p].shape[k - 1] for p in rows} for x in examples] if all(ragged) else []
    return bool(ragged) and all(ragged) and all([len(found) == 1 for found in lengths])


def checked(op: OpName, examples: Any) -> list[Any]:
    """Examples as a list."""
    if isinstance(examples, (Container, Mapping, Tensor, str)) or not isinstance(examples, Iterable):
        hint = f"tdc.{op}([td0, td1])"
        raise DtypeError(message(op, "a list of TensorDicts", describe(examples), hint=hint))
    found = list(examples)
    if not found:
        hint = "give one; its keys are those of the batch"
        raise StructureError(message(op, "at least one example", "an empty list", hint=hint))
    wrong = {f"example {i}": describe(x) for i, x in enumerate(found) if not is_tensordict(x) and not has_fields(x)}
    hint = "[{'x': x, 'y': y} for x, y in samples]"
    refuse_wrong(DtypeError, op, "TensorDicts, mappings or records", wrong, "others", hint)
    return found


def examples_of(op: OpName, tds: Any, strict: bool = True) -> list[TensorDict]:
    """Examples as TensorDicts of the same keys and Static values; those that all have, unless `strict`."""
    found = [as_tensordict(td) for td in checked(op, tds)]
    found = found if strict else in_common(found)
    same_keys(op, *found)
    return found


def check_choices(op: OpName, td: TensorDict, side: Any, mask_key: NestedKey | None) -> None:
    """Refuse another side, and a key for masks at which there are data, which the masks would replace."""
    if side not in ("right", "left"):
        expected, hint = "side='right' or side='left'", "the side of the padding"
        raise ShapeError(message(op, expected, f"{side!r}", hint=hint))
    if mask_key is not None and mask_key in td:
        got, hint = f"{show(as_path(mask_key, op))!r}, which the examples have", "mask_key='mask', or another name"
        raise KeyPathError(message(op, "a mask_key that the examples do not have", got, hint=hint))


def fills_of(td: TensorDict, value: Any) -> dict[KeyPath, Any]:
    """The padding of each leaf that it is given for; the entry of a leaf goes before that of a node above."""
    if not isinstance(value, Mapping):
        check_fills("data.pad_sequence", {"value": value})
        return dict.fromkeys(td._leaves, value)
    given = {existing_path(td, "data.pad_sequence", key): v for key, v in value.items()}
    check_fills("data.pad_sequence", {show(p): v for p, v in given.items()})
    order = sorted(given, key=depth)
    return {leaf: given[p] for p in order for leaf in td._leaves if within(leaf, p)}


def check_fills(op: OpName, values: Mapping[str, Any]) -> None:
    """Refuse padding that is no number."""
    wrong = {name: describe(v) for name, v in values.items() if not isinstance(v, (Number, Tensor))}
    refuse_wrong(DtypeError, op, "numbers to pad with", wrong, "others", "value=0.0, or value={'key': -1}")


def dims_of(op: OpName, td: TensorDict, keys: Any) -> dict[KeyPath, Dims]:
    """Paths of keys and the ragged dims there, counted with the batch as dim 0."""
    given: Any = keys
    if isinstance(keys, Mapping):
        return {existing_path(td, op, key): dim for key, dim in given.items()}
    dim = len(td._size) + 1
    return {existing_path(td, op, key): dim for key in keys_of(op, [keys] if isinstance(keys, str) else keys)}


def stack_along(op: OpName, tds: list[TensorDict], dim: int, keys: Any, convert: Convert) -> TensorDict:
    """A batch of examples that differ in size along one dim."""
    first = tds[0]
    if not isinstance(dim, int) or dim < 0:
        raise ShapeError(message(op, "a dim of at least 0", f"{dim!r}", hint="dim=0 is the first dim of an example"))
    if keys is None:
        dims = {p: dim + 1 for p, x in without_shared(first._leaves).items() if x.ndim > dim}
    else:
        dims = dict.fromkeys(dims_of(op, first, keys), dim + 1)
    leaves = stack_leaves(op, tds, dims, convert, "name keys that differ in keys=, or keep them out of the batch")
    return as_batch(op, leaves, without_extra(first._nodes), (len(tds), *first.batch_size[:dim]), first.device)


def as_batch(op: OpName, leaves: Leaves, nodes: Nodes, size: tuple[int, ...], device: Any) -> TensorDict:
    """A TensorDict of stacked leaves."""
    batch_size = torch.Size(size)
    leaves = seated(leaves, nodes, batch_size)
    check_leaves(op, leaves, nodes, batch_size, "ragged dims lie behind the batch dims")
    mark_examples(leaves)
    return build_td(leaves, nodes, batch_size, device)


def stack_leaves(
    op: OpName, tds: list[TensorDict], ragged: Mapping[KeyPath, Dims], convert: Convert, hint: str
) -> Leaves:
    """Each leaf of all examples as one: packed and converted where its path is in `ragged`, stacked where not."""
    leaves: Leaves = {}
    kinds: dict[str, str] = {}
    shapes: dict[str, str] = {}
    known: list[tuple[Any, NestedTensor]] = []
    for path, xs in together(op, *tds):
        dims = ragged.get(path)
        shared = [x for x in xs if type(x) is Shared]
        if len(shared) == len(xs):
            check_equal(op, shared)
            leaves[path] = shared[0]
            continue
        wrong_kind, wrong_shape = misfits(xs, dims)
        if wrong_kind:
            kinds[show(path)] = wrong_kind
        elif wrong_shape:
            shapes[show(path)] = wrong_shape
        elif dims is None:
            leaves[path] = torch.stack(xs)  # type: ignore[arg-type]  # they may be ragged or registered leaves
        elif isinstance(xs[0], NestedTensor):
            two_levels: Any = pack(xs)
            leaves[path] = convert(path, two_levels)
        else:
            leaves[path] = convert(path, with_known_structure(pack(xs, ragged_dim=dims), xs, dims, known))
    which, cure = "keys of other kinds or dtypes", "convert them with .to(dtype), or td.exclude(key) first"
    refuse_wrong(DtypeError, op, "tensors of one dtype for each key", kinds, which, cure)
    expected = "examples of equal sizes but for ragged dims"
    refuse_wrong(ShapeError, op, expected, shapes, "keys of different sizes", hint)
    return leaves


def misfits(xs: tuple[Any, ...], dims: Any) -> tuple[str, str]:
    """Differences of leaves from the first: in kind or dtype, or in shape but for ragged dims. An empty text if not."""
    first = xs[0]
    ragged = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    if ragged and not isinstance(first, Tensor) and not (isinstance(first, NestedTensor) and ragged == (1,)):
        return f"{describe(first)}, no tensor", ""
    if ragged and not (ragged[0] >= 1 and ragged[-1] <= first.ndim):
        return "", f"{describe(first)} has no dim {ragged[-1] - 1} that could differ"
    sizes = [n for d, n in enumerate(first.shape) if d + 1 not in ragged]
    for i, x in enumerate(xs):
        other_kind = isinstance(x, Tensor) != isinstance(first, Tensor) or x.dtype != first.dtype
        if other_kind or x.ndim != first.ndim or sizes != [n for d, n in enumerate(x.shape) if d + 1 not in ragged]:
            text = f"{describe(first)} and in example {i} {describe(x)}"
            return (text, "") if other_kind else ("", text)
    return "", ""


def with_known_structure(
    packed: NestedTensor, xs: tuple[Any, ...], dims: Dims, known: list[tuple[Any, NestedTensor]]
) -> NestedTensor:
    """A packed batch with the structure of an earlier one of the same lengths, where there is one."""
    first, last = (dims, dims) if isinstance(dims, int) else (dims[0], dims[-1])
    sizes = (first, last, [tuple(x.shape[first - 1 : last]) for x in xs], xs[0].device)
    for others, earlier in known:
        if others == sizes:
            return earlier.with_values(packed.values)
    known.append((sizes, packed))
    return packed


def pad(packed: NestedTensor, value: float, known: list[tuple[Any, MaskedBatch]]) -> MaskedBatch:
    """A packed batch as a padded one, with the lengths of an earlier one of the same structure."""
    if not isinstance(packed, NestedTensor):
        hint = "name it in ragged_keys="
        raise UnsupportedError(message("data.collate", "tensors in keys to be padded", describe(packed), hint=hint))
    padded = to_padded(packed, value)
    for structure, earlier in known:
        if structure is packed.structure:
            return earlier.with_data(padded.data)
    known.append((packed.structure, padded))
    return padded


def padded_left(x: MaskedBatch) -> Tensor:
    """The data of a padded batch with the padding of each example in front of it."""
    d = x.ragged_dims[0]
    return shift_rows(x.data.movedim(d, 1), x.lengths[:, 0], "left", "data.pad_sequence", back=True).movedim(1, d)


def mask_of(x: MaskedBatch, side: str) -> Tensor:
    """Mask of real elements in a batch that is padded on one side: (B, *S0, L)."""
    d, mask = x.ragged_dims[0], x.mask
    mask = mask.view(mask.shape[: d + 1]).expand(x.data.shape[: d + 1])
    return mask if side == "right" else mask.flip(d)


def in_common(tds: Sequence[TensorDict]) -> list[TensorDict]:
    """TensorDicts with the leaves and equal Static values that all of them have."""
    first = tds[0]
    same = [p for p in first._leaves if all([p in td._leaves for td in tds])]
    fixed = [p for p, n in statics(first._nodes).items() if all([td._nodes.get(p) == n for td in tds])]
    return [td.select(*same, *fixed) for td in tds]
