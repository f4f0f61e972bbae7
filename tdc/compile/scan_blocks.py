"""Layers of one form, one behind the other, as one loop over their stacked parameters.

    net = tdc.compile.scan_blocks(net, nn.TransformerEncoderLayer)      each run of such layers is one module
    net = tdc.compile.unscan_blocks(net)                                they are layers again, with trained weights

A graph of 24 layers takes four times as long to compile as one of 6. A loop has one layer in its graph. Values,
gradients and buffers are those of the layers one after the other.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tdc.compile.checkpoint import check_kinds, copy_of
from tdc.compile.functional import Store, find_stores, stack_modules, with_values
from tdc.compile.loops import scan
from tdc.compile.upstream import traced
from tdc.core.dynamo import under_transform
from tdc.core.errors import DtypeError, StructureError, describe, message, refuse_wrong
from tdc.core.typing import KeyPath
from tdc.tensordict.paths import join

OP = "compile.scan_blocks"
LISTS = (nn.ModuleList, nn.Sequential)
COMPARED_APART = ("_parameters", "_buffers", "_modules", "training")  # attributes of a module
Module = TypeVar("Module", bound=nn.Module)
Children = list[tuple[str, nn.Module | None]]


class BlockStack(nn.Module):
    """Blocks of one form as one module: `block` is one of them, with parameters and buffers stacked along dim 0.

    `stack(x, *args, **kwargs)` runs x through the blocks, each with the same further arguments.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        stacked = stack_modules(blocks)
        self.number, self.block = len(blocks), remade(blocks[0], lambda path, x: stacked[path])

    def __getattr__(self, name: str) -> Any:
        """Read attributes of the first block, such as `self_attn.batch_first`, which are the same for all."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the last block."""
        stores: list[Store] = []
        find_stores(self.block, (), stores)
        stacked = {id(t): t for s in stores for t in s.tensors.values() if t is not None}
        written = [(s.tensors, name) for s in stores if s.is_buffer for name, t in s.tensors.items() if t is not None]
        copied = {id(store[name]) for store, name in written}

        def run(x: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
            pairs = zip(stacked, tensors, strict=True)
            now = {key: t.detach().clone() if key in copied else t for key, t in pairs}
            given = [{k: now[id(t)] for k, t in s.tensors.items() if t is not None} for s in stores]
            return with_values(
                self.block, stores, given,
                lambda: (self.block(x, *args, **kwargs), [store[name] for store, name in written]),
            )  # fmt: skip

        out, buffers = along(run, x, list(stacked.values()))
        for (store, name), new in zip(written, buffers, strict=True) if self.training else ():
            store[name].copy_(new)
        return out

    def blocks(self) -> list[nn.Module]:
        """The blocks, whose parameters and buffers are views of the stacked ones."""
        return [remade(self.block, lambda path, x, i=i: x.detach()[i]) for i in range(self.number)]

    def extra_repr(self) -> str:
        """Number of blocks."""
        return f"{self.number} blocks"


def along(run: Callable[..., Any], x: Any, stacked: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Compute `x, y = run(x, slices)` for all slices, in a loop of the graph or of Python; return x and stacked y."""
    if traced() and not under_transform():
        return scan(run, x, stacked)
    found: list[list[Tensor]] = []
    for slices in zip(*[t.unbind() for t in stacked], strict=True):
        x, y = run(x, list(slices))
        found.append(y)
    return x, [torch.stack(ys) for ys in zip(*found, strict=True)]


def scan_blocks(
    module: Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], *, ignore: Collection[str] = ()
) -> Module:
    """Copy a module with consecutive blocks of a kind as one loop over them.

    Shapes:
        a parameter `(*S)` of K blocks becomes one of `(K, *S)`; its name has the position of the first, then `block`.
        The first input of a block has the form of its output; further arguments are the same for all.

    Args:
        module: is left as it is. In copies of its `nn.ModuleList`s and `nn.Sequential`s each run of two or more blocks
            becomes a `BlockStack`; all other parameters and buffers are shared.
        kind: a class of modules, or several.
        ignore: names of attributes without effect on results that blocks may differ in, such as the "layer_idx" of
            models without a cache.

    Raises:
        DtypeError: no module; a kind that is no class of modules.
        StructureError: no such run; blocks that differ in structure or attributes, or that share parameters with
            others; all differences are named.

    Compile:
        fullgraph, one block in the graph. Eagerly, under `vmap` and in the loop of `accumulate=` the blocks run in a
        Python loop. The loop keeps up to twice the memory for gradients that the blocks keep, checkpoints in it too.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        >>> short = scan_blocks(nn.Sequential(net[0], nn.Sequential(*net[1:])), nn.Linear)
        >>> [(name, tuple(p.shape)) for name, p in short.named_parameters()][2:]
        [('1.0.block.weight', (2, 3, 3)), ('1.0.block.bias', (2, 3))]
        >>> torch.equal(short(torch.ones(1, 2)), net(torch.ones(1, 2)))
        True

    Source:
        `nn.scan` of Flax and `layer_stack` of Haiku, for modules of torch.
    """
    names = check_kinds(OP, module, kind)
    if isinstance(ignore, str) or not all([isinstance(name, str) for name in ignore]):
        raise DtypeError(message(OP, "names of attributes", describe(ignore), hint='ignore=["layer_idx"]'))
    uses = Counter([id(p) for _, p in module.named_parameters(remove_duplicate=False)])
    known: dict[nn.Module, nn.Module] = {}
    found = rebuilt(module, partial(stacked_runs, kind, tuple(ignore), uses), known)
    if not any([isinstance(m, BlockStack) for m in found.modules()]):
        expected = f"two {names}, one behind the other in an nn.ModuleList or nn.Sequential"
        raise StructureError(message(OP, expected, "no such blocks", hint="name the class of the layers that repeat"))
    return found  # type: ignore[return-value]  # a copy, of the class of the module


def unscan_blocks(module: Module) -> Module:
    """Undo `scan_blocks`, with the trained weights of the blocks.

    Args:
        module: is left as it is. Parameters of the blocks are views of the stacked ones, all others are shared.

    Raises:
        DtypeError: no module.

    Compile:
        Not for use in a compiled function.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        >>> list(unscan_blocks(scan_blocks(net, nn.Linear)).state_dict()) == list(net.state_dict())
        True

    Source:
        `tdc.compile.scan_blocks`.
    """
    if not isinstance(module, nn.Module):
        hint = "unscan_blocks(scan_blocks(net, nn.TransformerEncoderLayer))"
        raise DtypeError(message("compile.unscan_blocks", "a module", describe(module), hint=hint))

    def of_stacks(children: Children) -> Iterator[nn.Module | None]:
        for _, child in children:
            yield from child.blocks() if isinstance(child, BlockStack) else [child]

    found = rebuilt(module, of_stacks, {})
    return found  # type: ignore[return-value]  # a copy, of the class of the module


# -- modules made of others


def remade(block: nn.Module, make: Callable[[KeyPath, Tensor], Tensor]) -> Any:
    """A copy of a module with other tensors, made of path and tensor; one that it has under two names stays one."""
    stores: list[Store] = []
    find_stores(block, (), stores)
    shared = {id(t): t for s in stores for t in s.tensors.values() if t is not None}
    found, made = copy.deepcopy(block, dict(shared)), dict[int, Tensor]()
    stores = []
    find_stores(found, (), stores)
    for prefix, store, is_buffer, _ in stores:
        for name, x in store.items():
            if x is not None and id(x) not in made:
                new = make(join(prefix, name), x)
                made[id(x)] = new if is_buffer else nn.Parameter(new, x.requires_grad)
        store.update({name: made[id(x)] for name, x in store.items() if x is not None})
    return found


def rebuilt(
    module: nn.Module, rewrite: Callable[[Children], Iterator[nn.Module | None]], known: dict[nn.Module, nn.Module]
) -> nn.Module:
    """A copy of the tree of modules with the children of numbered lists rewritten; tensors are shared."""
    if module not in known:
        known[module] = own = copy_of(module)
        children: Children = list(module._modules.items())
        if isinstance(module, LISTS) and all([name.isdigit() for name, _ in children]):
            children = [(str(i), child) for i, child in enumerate(rewrite(children))]
        own._modules = {k: None if child is None else rebuilt(child, rewrite, known) for k, child in children}
    return known[module]


def stacked_runs(
    kind: Any, ignore: tuple[str, ...], uses: Mapping[int, int], children: Children
) -> Iterator[nn.Module | None]:
    """The children of a list, with runs of blocks as one each."""
    for is_block, run in groupby([child for _, child in children], lambda child: isinstance(child, kind)):
        blocks: list[Any] = list(run)
        if is_block and len(blocks) > 1:
            check_alike(blocks, ignore, uses)
            yield BlockStack(blocks)
        else:
            yield from blocks


# -- blocks that are no loop


def check_alike(blocks: list[nn.Module], ignore: tuple[str, ...], uses: Mapping[int, int]) -> None:
    """Refuse blocks that differ in what a loop has once, or that share parameters with others."""
    own = [Counter([id(p) for _, p in block.named_parameters(remove_duplicate=False)]) for block in blocks]
    for i, block in enumerate(blocks):
        names = {name: "of another module, too" for name, p in block.named_parameters() if uses[id(p)] > own[i][id(p)]}
        hint = "leave blocks that share parameters as they are"
        refuse_wrong(StructureError, OP, "blocks with parameters of their own", names, "shared ones", hint)
        wrong = {f"block {i}, {where}": text for where, text in differences(blocks[0], block, ignore).items()}
        hint = 'ignore=["layer_idx"] for attributes on which no result depends; else leave these blocks as they are'
        refuse_wrong(StructureError, OP, "blocks that are alike", wrong, "differences from block 0", hint)


def differences(first: nn.Module, other: nn.Module, ignore: tuple[str, ...]) -> dict[str, str]:
    """Differences of attributes of a block, and of the modules in it, from those of the first, `{where: how}`."""
    found: dict[str, str] = {}
    theirs = dict(first.named_modules())
    for name, module in other.named_modules():
        if name in theirs:
            ours, base = vars(module), vars(theirs[name])
            for key in sorted({*ours, *base} - {*COMPARED_APART, *ignore}):
                a, b = ours.get(key), base.get(key)
                if not same(a, b):
                    found[f"{name}.{key}".lstrip(".")] = f"{shown(a)}, in block 0 {shown(b)}"
    trained = {name: p.requires_grad for name, p in first.named_parameters()}
    for name, p in other.named_parameters():
        if p.requires_grad != trained.get(name, p.requires_grad):
            found[name] = f"requires_grad={p.requires_grad}, in block 0 {trained[name]}"
    return found


def shown(x: Any) -> str:
    """An attribute in a message."""
    return repr(x) if isinstance(x, (int, float, str)) else describe(x)


def same(a: Any, b: Any) -> bool:
    """True if two attributes are one object, or equal."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (Tensor, nn.Module)):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all([same(x, y) for x, y in zip(a, b, strict=True)])
    if isinstance(a, dict):
        return list(a) == list(b) and all([same(x, b[key]) for key, x in a.items()])
    return (a == b) is True  # of an array it is none
