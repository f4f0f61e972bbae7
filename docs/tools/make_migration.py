"""Writes docs/migration.md: what users of tensordict write, and what to write here.

python docs/tools/make_migration.py

`ROWS` is the one table. `ours` is code, or `SAME`, that runs in the namespace `sample()` gives; a test runs every row.
A row without it is something that is left out for good, and `note` says why.
"""

from __future__ import annotations

import functools
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import tdc
from tdc import ObjectArray, Static, TensorDict
from tdc.migration import EARLIER, instead

PAGE = Path(__file__).parents[1] / "migration.md"
HEAD = """\
# Coming from tensordict, or from an earlier version

Write `td = td.set(k, v)`: a TensorDict is immutable, so `td.set(k, v)` on a line of its own has no effect. Methods
that write in place in tensordict return a new TensorDict here, which shares all other leaves. There are no locks, no
global settings, no lazy stacks, no `inplace=` and no `out=`. Only `tdc.copy_` writes into memory.

In the tables `td` has batch size `[3, 4]`, `tds` is a list of such, and `x` is a tensor of that size. `examples` have
different lengths, `packed` is a NestedTensor, `padded` a MaskedBatch. Where the middle cell is empty the feature does
not exist here, and the note says why. The error for a missing name says the same as its row, also for the [names of
earlier versions](#names-of-earlier-versions). `python docs/tools/make_migration.py` generates this page, and a test
runs every line of it.
"""


SAME = "the same"


class Row(NamedTuple):
    theirs: str
    ours: str = ""
    note: str = ""

    @property
    def code(self) -> str:
        """Code that runs; an empty text for what is left out."""
        return self.theirs if self.ours == SAME else self.ours


ROWS: dict[str, list[Row]] = {
    "Making one": [
        Row("TensorDict({'a': x}, batch_size=[3, 4])", SAME),
        Row("TensorDict(a=x, batch_size=[3, 4])", SAME, "a keyword that is no argument is a key"),
        Row("TensorDict({'a': x}, batchsize=[3])", "", "an error: sizes for a name that is nearly `batch_size`"),
        Row(
            "TensorDict.from_dict(d, auto_batch_size=True)",
            instead("from_dict"),
            "the batch size is never guessed: say how many dims it has",
        ),
        Row("td.auto_batch_size_()", instead("auto_batch_size_")),
        Row("td.batch_size = [3]", "td = td.with_batch_size([3])"),
        Row("td.clear_device_()", instead("clear_device_")),
        Row(
            "TensorDict.from_pytree(tree)",
            instead("from_pytree"),
            "`tdc.interop.to_pytree(inner, spec)` undoes it",
        ),
        Row("TensorDict.from_dataclass(dc)", instead("from_dataclass")),
        Row("TensorDict.from_namedtuple(nt)", instead("from_namedtuple")),
        Row("TensorDict.from_struct_array(array)", instead("from_struct_array")),
        Row("TensorDict.from_module(net)", instead("from_module"), "detached; tied parameters stay tied"),
        Row("TensorDict.from_modules(net, net)", instead("from_modules")),
        Row("td.empty()", SAME),
        Row("td.copy()", instead("copy"), "nothing can change it"),
        Row("td.clone()", SAME),
        Row("td.new_zeros(5)", SAME),
        Row("td.names, td.refine_names(...)", "", instead("names")),
    ],
    "Reading and writing by key": [
        Row("td['a'], td['b', 'c'], td.get('q', None)", SAME),
        Row("td['a'] = x", "td = td.set('a', x)"),
        Row("td.set('a', x, inplace=True)", "tdc.copy_(td['a'], x)", "writes into memory that others share"),
        Row("td.update({'a': x})", "td = td.update({'a': x})", "or `td.replace(a=x)`"),
        Row("td.setdefault('q', x)", "td = td.setdefault('q', x)"),
        Row("del td['a']", "td = td.delete('a')"),
        Row("value = td.pop('a')", "value, td = td.pop('a')"),
        Row("td.rename_key_('a', 'z')", instead("rename_key_")),
        Row("td.select('a'), td.exclude('a')", SAME),
        Row("td.split_keys(['a'])", "first, rest = td.split_keys(['a'])"),
        Row("td.separates('a')", instead("separates"), "or `tdc.partition`"),
        Row(
            "td.keys(True, True), td.items(True)",
            "td.keys(True, True), td.items(True)",
            "a str at the top, a tuple below; same arguments",
        ),
        Row("td.sorted_keys, td.keys(sort=True)", "td.keys(sort=True)", "also `values` and `items`"),
        Row(
            "td.keys(True, True, is_leaf=fn)",
            "td.keys(True, True, is_leaf=lambda cls: True)",
            "`is_leaf` says by class where to stop",
        ),
        Row(
            "td.flatten_keys('.'), td.unflatten_keys('.')",
            "td.flatten_keys('.').unflatten_keys('.')",
            "a key that holds the separator is an error",
        ),
        Row("td.to_dict(), td.numpy()", "td.to_dict(), td.to_numpy()"),
        Row("td.filter_empty_()", instead("filter_empty_")),
        Row(
            "for key in keys: td[key] = x", "m = td.mutate(); m['a'] = x; td = m.finish()", "a builder for many writes"
        ),
        Row("td.cat_tensors('f', ('b', 'c'), out_key='z', dim=-1)", instead("cat_tensors")),
        Row("td.stack_tensors('a', 'e', out_key='z', dim=-1)", instead("stack_tensors")),
        Row("merge_tensordicts(td, other)", instead("merge_tensordicts")),
        Row("td.lock_(), td.unlock_(), td.is_locked", "", instead("lock_")),
        Row("td.create_nested('q')", instead("create_nested")),
    ],
    "Indexing": [
        Row("td[0], td[:, 1:], td[mask], td[[0, 2]]", SAME),
        Row("td[0] = other[0]", "td = td.at[0].set(other[0])"),
        Row("td[mask] = 0", "td = td.at[mask].set(0)", "also `add`, `mul`, `min`, `max`, `apply`"),
        Row(
            "td[idx.clamp(max=2)] = 0",
            "td = td.at[torch.tensor([0, 9])].set(0, mode='clip')",
            "or `mode='drop'`, as in JAX; else an error",
        ),
        Row("td.set_at_('a', 0, idx)", instead("set_at_")),
        Row("td.get_at('a', 0)", instead("get_at")),
        Row("td.masked_select(mask)", SAME),
        Row("td.masked_fill(mask, 0)", SAME),
        Row("td.gather(0, index)", SAME),
        Row("td.where(mask, other)", SAME),
        Row("tensordict.group_by(td, 'id')", "tdc.data.group_by(td.flatten().set('id', ids), 'id')", "one batch dim"),
    ],
    "Shapes, joining, splitting": [
        Row("td.reshape(12), td.permute(1, 0), td.unsqueeze(0)", SAME),
        Row("td.expand(2, 3, 4), td.repeat_interleave(2, dim=0)", SAME),
        Row("with td.view(-1) as flat: ...", "flat = td.view(-1)", "no undo at the end of a block: nothing changed"),
        Row("torch.stack(tds), TensorDict.stack(tds)", instead("stack"), "always dense; in a compiled function a list"),
        Row(
            "tds without some keys",
            "torch.stack([td.select('a', 'e') for td in tds])",
            "or `tdc.data.ragged_stack(tds, strict=False)`",
        ),
        Row("torch.cat(tds)", SAME),
        Row("td.unbind(0), td.split(2), td.chunk(2)", SAME),
        Row(
            "LazyStackedTensorDict.lazy_stack(tds)",
            instead("lazy_stack"),
            "NestedTensor leaves where lengths differ",
        ),
        Row("LazyStackedTensorDict(...).append(td)", "", instead("append")),
        Row("tensordict.pad(td, [0, 1])", instead("pad"), "dims from the last, as in torch"),
        Row("tensordict.pad_sequence(tds)", "tdc.data.pad_sequence(examples)", "MaskedBatch leaves, with their mask"),
        Row(
            "pad_sequence(tds, padding_side='left', return_mask=True)",
            "tdc.data.pad_sequence(examples, side='left', mask_key='masks')",
            "plain tensors: a MaskedBatch has its padding behind",
        ),
        Row(
            "DataLoader(data, collate_fn=...)",
            "tdc.data.collate(list(td.unbind(0)))",
            "each key is stacked, padded or packed, as you say",
        ),
        Row("DataLoader(td, collate_fn=lambda x: x)", "tdc.data.collate(td)", "as `collate_fn`: returns it as it is"),
    ],
    "Arithmetic and functions": [
        Row("td + 1, td * other, td == other", SAME),
        Row("td.add_(1), td.zero_(), td.fill_('a', 0)", "td = td + 1; td = torch.zeros_like(td)"),
        Row("td + x", "td + x", "`x` broadcasts against the batch size, and is extended over features"),
        Row("td.exp(), td.clamp(0, 1), td.lerp(other, 0.5)", SAME),
        Row("td.sum(0), td.mean(dim=1), td.amax(0)", "td.sum(0), td.mean(dim=1), td.amax(0)", "batch dims"),
        Row("td.sum(dim='feature')", "td.apply(lambda leaf: leaf.flatten(2).sum(-1) if leaf.ndim > 2 else leaf)"),
        Row("td.sum(reduce=True)", "sum(leaf.sum() for leaf in td.values(True, True))"),
        Row("td.norm(reduce=True)", "tdc.optim.global_norm(td.with_batch_size([]))"),
        Row("(td == other).all()", "(td == other).all()", "one answer; `all(dim)` reduces a batch dim of each leaf"),
        Row("td.apply(fn), td.apply(torch.add, other)", SAME),
        Row(
            "td.map(fn, dim=0, chunksize=2)",
            "td.map(fn, dim=0, chunksize=2)",
            "in this process, or `num_workers=2`, `executor=pool`; a generator or a pool is no argument",
        ),
        Row("list(td.map_iter(fn))", "list(td.map_iter(fn, chunksize=2))", "`shuffle=True` shuffles parts"),
        Row(
            "assert_close(td, other)", "tdc.testing.assert_close(td, other, rtol=0, atol=1.5)", "names every difference"
        ),
        Row("td.apply_(fn)", instead("apply_")),
        Row("td.apply(torch.add, other, default=0)", SAME),
        Row(
            "td.apply(fn, is_leaf=is_step)",
            "td.apply(lambda x: x, is_leaf=lambda cls: True)",
            "`fn` gets inner nodes, not their leaves",
        ),
        Row("td.apply(fn, batch_size=[])", "td.apply(torch.sum, batch_size=[])"),
        Row("td.named_apply(fn, nested_keys=True)", instead("named_apply")),
        Row("torch.vmap(fn, (0, None))(td, x)", "torch.vmap(lambda row, x: row, (0, None))(td, x)"),
        Row(
            "torch.vmap(fn, out_dims=(1,))(td)",
            "tdc.vmap(lambda row: row, out_dims=(1,))(td)",
            "torch takes `out_dims=1`",
        ),
        Row("td.detach(), td.data", instead("data")),
        Row("td.pack()", instead("pack")),
    ],
    "Dtypes, devices, sizes": [
        Row("td.to('cpu'), td.to(torch.float64)", SAME),
        Row("td.float(), td.int(), td.cpu()", SAME),
        Row("td.bfloat16(cast_filter=torch.is_floating_point)", "td.to(torch.bfloat16, where=torch.is_floating_point)"),
        Row("td.share_memory_()", instead("share_memory_")),
        Row("td.bytes(), td.param_count()", "tdc.nbytes(td), tdc.param_count(td)", "`td.summary()` has all of it"),
        Row("td.device, td.requires_grad, td.is_cpu, td.is_cuda, td.is_meta", SAME, "of all leaves"),
        Row("td.dtype, td.depth, td.batch_dims, td.is_empty(), td.is_floating_point()", SAME),
    ],
    "Values that are no tensors, typed batches": [
        Row(
            "td['name'] = 'train'",
            "td = td.set('name', Static('train'))",
            "one object for the whole batch; a constant in a graph",
        ),
        Row("NonTensorData('train')", instead("NonTensorData")),
        Row("NonTensorStack('a', 'b')", instead("NonTensorStack"), "one object for each example"),
        Row("td.get_non_tensor('name')", instead("get_non_tensor"), "read like any other key"),
        Row("@tensorclass", "tdc.tensorclass", "frozen; or inherit from `tdc.TensorClass`"),
        Row("data.images = images", "data = data.replace(images=images)"),
        Row("MyData.from_tensordict(td)", "type(data).from_tensordict({'images': images})"),
        Row("data.to_tensordict()", SAME),
        Row(
            "@tensorclass(autocast=True), TensorClass['nocast']",
            "",
            "a field takes what its annotation says; convert before, as in a classmethod of your own",
        ),
        Row("TypedTensorDict", instead("TypedTensorDict"), "or a tensorclass"),
        Row("set_lazy_legacy, set_list_to_stack, ...", "", instead("set_lazy_legacy")),
    ],
    "Modules and files": [
        Row("with params.to_module(net): net(y)", instead("to_module"), "the module is not touched"),
        Row(
            "torch.vmap(call, (0, None))(stacked, y)",
            "torch.vmap(lambda p, y: tdc.functional_call(net, p, y), (0, None))(stacked, y)",
        ),
        Row(
            "TensorDict.from_modules(net, net, as_module=True)",
            "stacked = tdc.stack_modules([net, net])",
            "with buffers: `params, buffers = ...`",
        ),
        Row(
            "torch.vmap(lambda p, y: p(y), (0, None))(stacked, y)",
            "tdc.ensemble(net, stacked, randomness='same')(x)",
            "each member may have its own data",
        ),
        Row("TensorDictParams(params)", "tdc.nn.TensorDictParams(params)", "an `nn.Module`, for stock optimisers"),
        Row("torch.func.grad(loss)(params)", "tdc.grad(lambda p: tdc.functional_call(net, p, x).sum())(params)"),
        Row(
            "torch.func.jacrev(fn)(td)",
            "tdc.jacrev(lambda t: t['a'] * 2)(td)",
            "also `jacfwd`, `hessian`, `jvp`, `vjp`",
        ),
        Row(
            "loss.backward(); optim.step(); optim.zero_grad()",
            "step = tdc.compile.train_step(lambda p, y: tdc.functional_call(net, p, y).sum(), tdc.optim.adamw(1e-3))",
            "then `state, metrics = step(state, batch)`, one graph",
        ),
        Row("td if flag else other", "tdc.cond(torch.tensor(True), lambda t: t, lambda t: t + 1, (td,))", "in a graph"),
        Row(
            "for row in td.unbind(0): carry = fn(carry, row)",
            "tdc.scan(lambda carry, row: (carry + row['a'], row), x[0], td)",
            "also `while_loop`, `associative_scan`",
        ),
        Row(
            "TensorDictModule(net, ['a'], ['z'])",
            instead("TensorDictModule"),
            "a function of a TensorDict needs no wrapper",
        ),
        Row(
            "TensorDictSequential(first, second)",
            instead("TensorDictSequential"),
            "a function, or the `forward` of an `nn.Module`",
        ),
        Row("td.memmap('dir'), TensorDict.load_memmap('dir')", "", "td.memmap(path), tdc.io.load(path)"),
        Row("MemoryMappedTensor", "", instead("MemoryMappedTensor")),
        Row("td.state_dict()", instead("state_dict"), "flat keys, as of a module"),
        Row("td.load_state_dict(state_dict)", instead("load_state_dict")),
        Row(
            "torch.save(td, file), pickle",
            "import pickle; pickle.loads(pickle.dumps(td))",
            "loads with `weights_only=True`",
        ),
        Row("CudaGraphModule(fn)", instead("CudaGraphModule")),
        Row("ProbabilisticTensorDictModule", "", instead("ProbabilisticTensorDictModule")),
    ],
    "Names of earlier versions": [
        *[Row(f"{module}.{name}", now) for module, table in EARLIER.items() for name, now in table.items()],
    ],
}


def sample() -> dict[str, Any]:
    """Names that the rows of the tables use, made anew for each."""
    x = torch.arange(12.0).view(3, 4)
    d = {"a": x, "b": {"c": torch.ones(3, 4, 2)}, "e": x + 1, "f": torch.zeros(3, 4, 5)}
    td: Any = TensorDict(d, [3, 4])
    net, images = nn.Linear(4, 2), torch.ones(2, 3)
    params: Any = tdc.from_module(net)
    return {
        "F": F, "functools": functools, "packed": tdc.pack([x[0], x[1, :2]]), "padded": tdc.pack([x[0]]).to_padded(),
        "ObjectArray": ObjectArray, "Static": Static, "TensorDict": TensorDict, "tdc": tdc, "torch": torch,
        "array": np.zeros(3, dtype=[("f", "f4"), ("i", "i8")]), "d": d, "data": image_class()(images, batch_size=[2]),
        "dc": make_dataclass("Record", [("a", torch.Tensor)])(x), "fn": torch.neg, "ids": torch.arange(12) % 3,
        "idx": 0, "images": images, "index": torch.tensor([[0, 1, 2, 0]]), "mask": x > 3, "net": net,
        "nt": tdc.interop.to_namedtuple(td), "other": td + 1, "params": params, "examples": [td[0, :n] for n in (2, 4)],
        "stacked": torch.stack([params, params]), "td": td, "tds": [td, td + 1], "tree": [x, {"y": x}], "x": x, "y": x,
    }  # fmt: skip


def image_class() -> Any:
    """A tensorclass."""

    class Images(tdc.TensorClass):
        images: torch.Tensor

    return Images


def cell(text: str) -> str:
    """Code in a cell of a table."""
    return f"`{text}`" if text not in ("", SAME) else text


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, rows in ROWS.items():
        first = "earlier" if title.endswith("versions") else "tensordict"
        lines += [f"## {title}", "", f"| {first} | here | note |", "| --- | --- | --- |"]
        lines += [f"| {cell(row.theirs)} | {cell(row.ours)} | {row.note} |" for row in rows]
        lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
