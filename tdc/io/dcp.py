"""A TensorDict as a checkpoint of `torch.distributed.checkpoint`, for leaves that are spread over processes.

    .metadata            torch's index of the shards: a pickle
    __0_0.distcp ...     what each process wrote
    "__metadata__"       among the tensors there: the manifest of a store, as bytes

torch saves and loads shards, and spreads them anew; this adds what it does not know: which tensors are one, ragged
leaves, batch sizes, Static values. A name is that of a safetensors file, "text.values", so other programs find it.

Invariants:
  - all processes of the group call these functions with TensorDicts of one form, or all of them raise;
  - torch unpickles its index, so nothing is opened unless the caller says that the source is trusted.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.compile.ranks import is_lost, lost
from tdc.core.arguments import expect
from tdc.core.dtensor import group_from, is_dtensor
from tdc.core.dynamo import has_loaded
from tdc.core.errors import FormatError, StructureError, UnsupportedError, describe, first_line, message, refuse_wrong
from tdc.core.keys import missing_key, path_of, show
from tdc.core.one_storage import identity
from tdc.core.typing import NestedKey
from tdc.io.filenames import MANIFEST, Part, dotted, not_a_store, refuse_damage
from tdc.io.leaves import described, made
from tdc.io.load import names_of, stored_of, wanted_keys, within
from tdc.io.manifest import DTYPES, MOST_BYTES, Stored, dump, parse
from tdc.io.packed import METADATA, names_in
from tdc.io.publish import path_text
from tdc.io.save import PathLike
from tdc.tensordict.tensordict import TensorDict, build_td

WRITE, READ = "io.dcp_save", "io.dcp_load"
INDEX = ".metadata"
HINT = "save it again with tdc.io.dcp_save"
FAULTS = (UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
untyped: Any = torch


def dcp_save(td: TensorDict, path: PathLike, *, overwrite: bool = False, group: Any = None) -> None:
    """Write a TensorDict to a folder with `torch.distributed.checkpoint`; each process writes its shards of DTensors.

    All processes of the group call it, with TensorDicts of one form. Leaves that are no DTensors are compared, and
    written once. Without a process group it writes everything.

    Args:
        path: of the folder, which all processes see.
        overwrite: write over a checkpoint that is there. While it is written, neither the old nor the new one is whole.
        group: of processes, or a DeviceMesh with one dim; all by default.

    Raises:
        UnsupportedError: leaves and values that a store cannot hold; all are named.
        StructureError: the processes have TensorDicts of different forms, or different values of leaves that are no
            DTensors; raised in all of them.
        FormatError: a checkpoint or a store is at the path; two key paths that join to one name.
        OSError: the system refuses.
        DistError: a process is gone or came too late.

    Compile:
        Eager only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dcp_save(TensorDict({"fc": {"weight": torch.eye(2)}}), f"{folder}/step-1")
        ...     dcp_load(f"{folder}/step-1", trusted=True)["fc", "weight"]
        tensor([[1., 0.],
                [0., 1.]])

    Source:
        `torch.distributed.checkpoint.save`.
    """
    expect(WRITE, td, TensorDict, other=path)
    expect(WRITE, overwrite, bool, of=" for overwrite")
    text = path_text(WRITE, path)
    if not overwrite and any([os.path.exists(os.path.join(text, name)) for name in (INDEX, MANIFEST)]):
        hint = "overwrite=True, or choose another path, one for each step"
        raise FormatError(message(WRITE, "a path where nothing is", f"a checkpoint or a store at {text!r}", hint=hint))
    group = None if group is None else group_from(WRITE, group)
    plain, shards = without_shards(td)
    table, tensors = described(WRITE, plain, content=False)
    names = names_in(WRITE, table)
    data = dump(WRITE, table)
    with exchanging(WRITE, group):
        check_same(data, {names[at]: x for at, x in tensors.items() if not is_meta(x)}, group)
    state: dict[str, Tensor] = {names[at]: x for at, x in with_shards(tensors, plain, shards).items()}
    state[METADATA] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    writer = checkpoint().FileSystemWriter(text, overwrite=overwrite)
    try:
        with quiet(), exchanging(WRITE, group):
            checkpoint().save(state, storage_writer=writer, process_group=group)
    except checkpoint().CheckpointException as error:
        raise failure(error) from None


def dcp_load(
    path: PathLike, keys: NestedKey | Sequence[NestedKey] | None = None, *, like: TensorDict | None = None,
    trusted: bool = False, classes: Iterable[type] = (), group: Any = None,
) -> Any:  # fmt: skip
    """The TensorDict of a checkpoint of `dcp_save`, spread over as many processes as there are now.

    All processes of the group call it alike.

    Args:
        path: of the folder.
        keys: as of `tdc.io.load`: one key for what lies there, a list for some; only these are read.
        like: a TensorDict whose leaves say where those of the same key go: a DTensor its mesh and placement, a tensor
            its device. Its content is neither read nor changed. Leaves that it does not have are whole, on the host.
        trusted: that the checkpoint is your own, or comes from a party that may run code on this machine: torch's index
            of it is a pickle.
        classes: as of `tdc.io.load`.
        group: of processes, or a DeviceMesh with one dim; all by default.

    Returns:
        A TensorDict, or a leaf where `keys` is the key of one. Leaves that were one tensor are one again.

    Raises:
        FormatError: not trusted; no checkpoint, or one that `dcp_save` did not write or that says something else.
        KeyPathError: a key that is not there.
        UnsupportedError: leaves of like without content, on the device "meta".

    Compile:
        Eager only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dcp_save(TensorDict({"a": torch.arange(3), "b": torch.zeros(3)}, [3]), f"{folder}/step-1")
        ...     dcp_load(f"{folder}/step-1", ["a"], trusted=True).keys()
        ('a',)

    Source:
        `torch.distributed.checkpoint.load`.
    """
    text, wanted, known = path_text(READ, path), wanted_keys(keys, READ), names_of(classes, READ)
    expect(READ, trusted, bool, of=" for trusted")
    group = None if group is None else group_from(READ, group)
    if like is not None:
        check_like(like)
    if not trusted:
        hint = "trusted=True for a checkpoint of your own; tdc.io.load and from_safetensors for files of strangers"
        raise FormatError(message(READ, "trusted=True", "an index that is a pickle, which may run code", hint=hint))
    described_there = index_of(text)
    table = parse(READ, read_manifest(text, described_there, group))
    absent = [key for key in wanted if key not in table]
    if absent:
        raise missing_key(READ, path_of(absent[0]), [path_of(key) for key in table if key])
    chosen = within(table, set(wanted))
    needed = stored_of(table, chosen)
    names = names_in(READ, table)
    check_index({names[at]: x for at, x in needed.items()}, described_there)
    tensors = {at: room_for(at, x, like) for at, x in needed.items()}
    read_into({names[at]: x for at, x in tensors.items()}, text, group)
    several = isinstance(keys, list)
    return made(READ, chosen, () if several else wanted[0], tensors, known, several)


def checkpoint() -> Any:
    """torch's module, which `import torch` leaves out, and so does `import tdc`."""
    has_loaded("torch.distributed.checkpoint")
    return untyped.distributed.checkpoint


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings that there is no process group, and that something is overwritten: both are meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
        yield


@contextmanager
def exchanging(op: str, group: Any) -> Iterator[None]:
    """Raise a DistError if a process is gone or comes too late."""
    try:
        yield
    except RuntimeError as error:
        if is_lost(error):
            raise lost(op, dist.group.WORLD if group is None else group, error, {}) from error
        raise


def failure(error: Any) -> Exception:
    """The error of some process: torch has an exception around it that `except Exception` lets pass."""
    for found, *_ in error.failures.values():
        if isinstance(found, Exception):
            return found
    return OSError(str(error))


def is_meta(x: Any) -> bool:
    """True if a leaf is a tensor without content."""
    return isinstance(x, Tensor) and x.is_meta


def check_like(like: Any) -> None:
    """Refuse what says no place for leaves."""
    expect(READ, like, TensorDict)
    wrong = {show(p): f"{describe(x)} on meta" for p, x in like._leaves.items() if is_meta(x)}
    hint = "leave them out of like, or give torch.empty_like(x, device='cpu')"
    refuse_wrong(UnsupportedError, READ, "leaves of like on devices with memory", wrong, "others", hint)


# -- saving


def without_shards(td: TensorDict) -> tuple[TensorDict, dict[int, Any]]:
    """A TensorDict with a tensor without content in place of each DTensor, and the DTensors by these tensors."""
    shards: dict[int, Any] = {}
    known: dict[Any, Tensor] = {}
    leaves = dict(td._leaves)
    wrong = {show(p): f"{describe(x)}, which has no content" for p, x in leaves.items() if is_meta(x)}
    refuse_wrong(UnsupportedError, WRITE, "tensors with content", wrong, "others", "td.exclude(key)")
    for path, x in leaves.items():
        if is_dtensor(x):
            local = x.detach().to_local()
            key = (*identity(local), tuple(x.shape))
            if key not in known:
                known[key] = torch.empty(x.shape, dtype=x.dtype, device="meta")
                shards[id(known[key])] = x.detach()
            leaves[path] = known[key]
    return build_td(leaves, td._nodes, td._size, None), shards


def with_shards(tensors: dict[Part, Tensor], plain: TensorDict, shards: dict[int, Any]) -> dict[Part, Tensor]:
    """The tensors to store, with the DTensors again in place of those that stood for them."""
    found = dict(tensors)
    for keys, part in tensors:
        leaf: Any = plain._leaves.get(path_of(keys))
        if not part and is_meta(leaf):  # `described` has detached it
            found[keys, part] = shards[id(leaf)]
    return found


def check_same(data: bytes, tensors: dict[str, Tensor], group: Any) -> None:
    """All processes have the same manifest, and the same content of these tensors, or all of them raise."""
    if not dist.is_initialized():
        return
    own = {name: digest_of(x) for name, x in tensors.items()}
    summary = [hashlib.sha256(text).hexdigest() for text in (data, "".join(own.values()).encode())]
    forms, contents = zip(*told(summary, group), strict=True)
    others = [f"process {i}" for i, digest in enumerate(forms) if digest != forms[0]]
    hint = "the same keys, shapes, dtypes and Static values everywhere; DTensors have the shape of the whole"
    refuse_wrong(StructureError, WRITE, "TensorDicts of one form in all processes", others, "others", hint)
    if len(set(contents)) > 1:
        digests = told(own, group)
        wrong = {
            dotted((name,)): ", ".join([f"process {i}" for i, theirs in enumerate(digests) if theirs[name] != first])
            for name, first in digests[0].items()
            if any([theirs[name] != first for theirs in digests])
        }
        wrong = {name: f"{text} not as process 0" for name, text in wrong.items()}
        hint = "DTensors for what differs, as optim.sharded has them; or broadcast the values of one process"
        refuse_wrong(StructureError, WRITE, "the same values in all processes", wrong, "that differ", hint)


def digest_of(x: Tensor) -> str:
    """A digest of the content of a tensor."""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    content: Any = plain.reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def told(own: Any, group: Any) -> list[Any]:
    """An object of each process."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


# -- loading


def index_of(path: str) -> Any:
    """The entries of torch's index by name."""
    if not os.path.isfile(os.path.join(path, INDEX)):
        got = f"a folder without {INDEX} at {path!r}" if os.path.isdir(path) else f"nothing at {path!r}"
        raise not_a_store(READ, "a checkpoint", got, hint="tdc.io.dcp_save writes one; tdc.io.load reads a store")
    try:
        return checkpoint().FileSystemReader(path).read_metadata().state_dict_metadata
    except FAULTS as error:
        got = f"an index that torch cannot read: {type(error).__name__}"
        raise not_a_store(READ, "a checkpoint", got, hint=HINT) from None


def read_manifest(path: str, index: Any, group: Any) -> bytes:
    """The bytes of the manifest in a checkpoint."""
    size: Any = getattr(index.get(METADATA), "size", None)
    if size is None or len(size) != 1:
        hint = "torch.distributed.checkpoint.load reads those of other programs"
        raise not_a_store(READ, "a checkpoint of tdc.io.dcp_save", "one without a manifest", hint=hint)
    if size[0] > MOST_BYTES:
        raise not_a_store(READ, f"a manifest of at most {MOST_BYTES} bytes", f"one of {size[0]}", hint=HINT)
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    read_into({METADATA: data}, path, group)
    return data.numpy().tobytes()


def check_index(named: dict[str, Stored], index: Any) -> None:
    """The index has every tensor that is needed, as the manifest says it is."""
    wrong: list[str] = []
    for name, x in named.items():
        known = index.get(name)
        dtype: Any = getattr(getattr(known, "properties", None), "dtype", None)
        if known is None or tuple(getattr(known, "size", ())) != x.shape or dtype != DTYPES[x.dtype]:
            wrong.append(f"{dotted((name,))}: not as in the index")
    refuse_damage(READ, "a manifest that says what the index says", wrong, "others", HINT)


def room_for(at: Part, x: Stored, like: TensorDict | None) -> Tensor:
    """A tensor to load into: spread as the leaf of `like`, or on its device, or on the host."""
    keys, part = at
    leaf: Any = None if like is None else like._leaves.get(path_of(keys))
    dtype = DTYPES[x.dtype]
    if not part and is_dtensor(leaf):
        if tuple(leaf.shape) != x.shape:
            expected, got = f"like of the shape of {dotted(keys)}, {list(x.shape)}", describe(leaf)
            raise not_a_store(READ, expected, got, hint="leave the key out of like, or distribute_tensor of that shape")
        return untyped.empty_like(leaf.detach(), dtype=dtype)
    device = getattr(leaf, "device", None)
    return torch.empty(x.shape, dtype=dtype, device="cpu" if device is None or is_dtensor(leaf) else device)


def read_into(state: dict[str, Tensor], path: str, group: Any) -> None:
    """Load tensors by their names."""
    if not state:
        return
    reader = checkpoint().FileSystemReader(path)
    try:
        with quiet(), exchanging(READ, group):
            checkpoint().load(state, storage_reader=reader, process_group=group)
    except checkpoint().CheckpointException as error:
        found = failure(error)
        if isinstance(found, OSError) and not isinstance(found, FileNotFoundError):
            raise found from None
        got = f"files that torch cannot read: {first_line(found)}"
        raise not_a_store(READ, "a whole checkpoint", got, hint=HINT) from None
