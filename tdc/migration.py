"""Replacements for names of tensordict, torch.nested and DanLing, for earlier names, and for misspelt ones.

There is one table for each class and each module. A name of a class becomes a descriptor that raises `MethodError` with
its replacement, so existing attributes cost nothing; a name of a module goes through the module's `__getattr__`.
docs/tools/make_migration.py reads these tables, too.

Invariant: no name in a table exists here; `hasattr` of it is False.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib import import_module
from traceback import extract_stack
from types import ModuleType
from typing import Any, NoReturn

from tdc import compile as compiled
from tdc import data, dist, hf, interop, io, nn, ops, optim, testing
from tdc.core.container import Absent, error_of
from tdc.core.errors import DtypeError, MethodError, message
from tdc.core.rules import CLASS_NAMES
from tdc.ops.install import CLASSES as CLASSES  # which have their methods now
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.tensordict import TensorDict

CUT = {  # functions of earlier versions
    "stack": "torch.stack(tds)",
    "cat": "torch.cat(tds)",
    "to_padded": "packed.to_padded()",
    "to_packed": "padded.to_packed()",
    "unpack": "packed.unbind()",
    "to_torch": "packed.to_torch()",
    "from_dict": "tdc.as_tensordict(d, batch_dims=2)",
    "from_dataclass": "tdc.as_tensordict(dc)",
    "from_namedtuple": "tdc.as_tensordict(nt)",
    "from_struct_array": "tdc.as_tensordict(array)",
    "summary": "td.summary()",
    "reduce": "functools.reduce(lambda n, leaf: n + leaf.sum(), td.values(True, True), 0)",
}
MADE = {  # constructors: of TensorDict and of the module alike
    "from_any from_tuple": "tdc.as_tensordict(obj), or tdc.interop.from_pytree(tree) for lists and tuples",
    "from_consolidated": "tdc.io.from_safetensors(path)",
    "from_h5 from_zarr": "torch.load(file)",
    "load load_memmap load_memmap_": "tdc.io.load(path)",
    "from_csv from_json from_pandas from_parquet": "TensorDict({name: df[name].to_numpy() for name in df}, [len(df)])",
    "from_modules": "torch.stack([tdc.from_module(net), tdc.from_module(net)])",
    "fromkeys": "TensorDict(dict.fromkeys(keys, 0))",
    "lazy_stack": "tdc.data.ragged_stack(examples)",
    "maybe_dense_stack": "torch.stack(tds), or tdc.data.ragged_stack(examples) where lengths differ",
    "pad": "F.pad(td, (0, 0, 0, 1))",
    "save": "tdc.io.save(td, path)",
}
MAPPED = "td = td.memmap(path), or tdc.io.memmap_empty(spec, path), which tdc.copy_ fills"
WRITES = "no TensorDict ever changes; m = td.mutate() is a builder that does, and td = m.finish() what it built"
SENDS = "torch.distributed on leaves, e.g. td.apply(fn)"
FILES = "td.to_numpy(), then a writer of that format"
CASTS = "complex128 complex32 complex64 float16 float32 float64 int16 int32 int64 int8 uint16 uint32 uint64 uint8"
RAGGED = {
    "fill_": "torch.full_like(x, value)",
    "normal_": "torch.randn_like(x)",
    "uniform_": "torch.rand_like(x)",
    "zero_": "torch.zeros_like(x)",
    "from_tensor_mask": "tdc.from_padded(tensor, mask=mask).to_packed()",
    "from_packed": "tdc.NestedTensor(values, offsets)",
    "backward": "x.sum().backward(), or torch.autograd.backward(x, grads) in the form of x; then x.grad",
    "item": "x.sum().item() of one number, x.tolist() of all",
    "is_meta": "x.device.type == 'meta'; a module registers the tensors of a batch, not the batch itself",
    "length seqlens": "x.lengths",
    "H": "x.mH, or x.transpose(dim0, dim1)",
    "T": "x.mT swaps the last two dims, x.transpose(dim0, dim1) others",
}
INSTEAD: dict[Any, dict[str, str]] = {
    TensorDict: {
        **MADE,
        **{name: spelling for name, spelling in CUT.items() if name in ("stack", "cat") or name.startswith("from_")},
        "from_dict_instance": CUT["from_dict"],
        "from_list": "torch.stack([TensorDict(d) for d in dicts])",
        "from_pytree": "inner, spec = tdc.interop.from_pytree(tree)",
        "from_module": "params = tdc.from_module(net)",
        "from_schema": "tdc.interop.zeros(schema, batch_size)",
        "to_module": "tdc.functional_call(net, params, y)",
        "to_namedtuple": "tdc.interop.to_namedtuple(td)",
        "to_pytree": "tdc.interop.to_pytree(inner, spec)",
        "to_struct_array": "tdc.interop.to_struct_array(td)",
        "to_tensordict": "td.clone()",
        "to_lazystack": "td.unbind(0)",
        "densify to_padded_tensor": "td.apply(lambda leaf: leaf.to_padded().data)",
        "as_tensor": "td.apply(torch.as_tensor)",
        "atleast_1d atleast_2d atleast_3d": "td.unsqueeze(0)",
        "auto_batch_size_": "td = td.with_batch_size(tdc.interop.infer_batch_size(td))",
        "auto_device_": "td = td.with_device(next(iter(td.values(True, True))).device)",
        "clear_device_": "td = td.with_device(None)",
        "names refine_names rename rename_": "no names of dims: each would cost every compiled call a guard",
        "data": "td.detach()",
        "numpy": "td.to_numpy()",
        "tolist": "td.to_dict(), and leaf.tolist()",
        "copy": "td",
        "lock_ unlock_ is_locked": WRITES,
        "clear": "td = td.empty()",
        "set_": "tdc.copy_(td['a'], x) writes into memory; td = td.set('a', x) does not",
        "update_ load_": "tdc.copy_(td, {'a': x}) writes into memory; td = td.update({'a': x}) does not",
        "set_at_": "td = td.at[idx].set({'a': 0})",
        "update_at_": "td = td.at[idx].set(other)",
        "copy_ copy_at_": "tdc.copy_(td, src, index=None)",
        "get_at": "td['a'][0]",
        "get_item_shape": "td['a'].shape",
        "del_ popitem": "td = td.delete('a')",
        "rename_key_": "td = td.rename_keys({'a': 'z'})",
        "filter_empty_": "td = td.filter(lambda key, leaf: True)",
        "separates": "td, part = td.exclude('a'), td.select('a')",
        "sorted_keys": "td.keys(sort=True)",
        "create_nested": "td = td.set('q', {})",
        "cat_tensors cat_from_tensordict": "tdc.cat_keys(td, ['f', ('b', 'c')], 'z')",
        "stack_tensors stack_from_tensordict": "tdc.stack_keys(td, ['a', 'e'], 'z')",
        "get_non_tensor": "td.set('name', Static('train'))['name']",
        "set_non_tensor": "td = td.set('name', Static('train'))",
        "is_non_tensor": "not isinstance(td['a'], torch.Tensor)",
        "non_tensor_items filter_non_tensor_data": "td.filter(lambda key, leaf: isinstance(leaf, torch.Tensor))",
        "append extend insert": "a list of examples, then torch.stack(examples) or tdc.data.ragged_stack(examples)",
        "named_apply": "td.apply_with_path(lambda key, leaf: leaf)",
        "apply_": "td = td.apply(fn)",
        "fill_": "td.apply(lambda leaf: torch.full_like(leaf, value))",
        "zero_": "torch.zeros_like(td)",
        "normal_": "torch.randn_like(td)",
        "uniform_": "torch.rand_like(td)",
        "maximum_": "td = torch.maximum(td, other)",
        "minimum_": "td = torch.minimum(td, other)",
        "mod": "td % other",
        "rsub": "other - td",
        "requires_grad_": "td = td.apply(lambda leaf: leaf.detach().requires_grad_())",
        "zero_grad": "grads = tdc.grad(fn)(td), which are returned, not accumulated",
        "backward": "grads = tdc.grad(fn)(td), or torch.autograd.backward(losses)",
        "item": "td['a'].item()",
        "H T": "td.apply(lambda leaf: leaf.mT)",
        "to_padded": "td.apply(lambda leaf: leaf.to_padded())",
        "to_packed": "td.apply(lambda leaf: leaf.to_packed())",
        "pack": "flat, unravel = tdc.ravel(td)",
        "consolidate is_consolidated": "flat, unravel = tdc.ravel(td)",
        "bytes nbytes": "tdc.nbytes(td)",
        "param_count": "tdc.param_count(td)",
        CASTS: "td.to(dtype)",
        "pin_memory_": "td = td.pin_memory()",
        "share_memory_": "td = td.share_memory()",
        "state_dict": "tdc.interop.to_state_dict(td)",
        "load_state_dict": "tdc.interop.from_state_dict(net.state_dict())",
        "memmap_ memmap_like make_memmap is_memmap memmap_refresh_": MAPPED,
        "dumps": MADE["save"],
        "to_csv to_h5 to_json to_pandas to_parquet to_zarr": FILES,
        "all_gather all_reduce broadcast gather_and_stack reduce send recv isend irecv init_remote": SENDS,
    },
    NestedTensor: {
        **RAGGED,
        "register_hook": "x.values.register_hook(fn)",
        "copy_": "tdc.copy_(x.values, src), which writes into memory that others share",
        "data": "x.detach()",
        "numpy": "[row.numpy() for row in x.unbind()], or x.values.numpy()",
        "concat": "x.values",
        "element_sizes": "x.sizes",
        "mask": "x.to_padded().mask",
        "packed_like": "x.with_values(values)",
        "packed_local_indices": "tdc.positions(x)",
        "packed_offsets": "x.cu_seqlens, or x.offsets",
        "tensor": "x.to_padded().filled(0)",
        "tensor_mask": "p = x.to_padded(); p.data, p.mask",
        "to_padded_tensor": "x.to_padded().filled(0)",
        "to_torch_nested": "x.to_torch()",
    },
    MaskedBatch: {
        **RAGGED,
        "register_hook": "x.data.register_hook(fn)",
        "copy_": "tdc.copy_(x.data, src), which writes into memory that others share",
        "numpy": "x.data.numpy(), and x.lengths.numpy()",
        "offsets": "x.to_packed().offsets",
        "concat values": "x.to_packed().values",
        "tensor to_padded_tensor": "x.filled(0)",
        "tensor_mask": "x.data, x.mask",
    },
}  # fmt: skip
MODULE: dict[str, str] = {
    **MADE,
    "LazyStackedTensorDict": "tdc.data.ragged_stack(examples)",
    "dense_stack_tds": "torch.stack(tds)",
    "merge_tensordicts": "tdc.merge(td.select('a'), other.select('b'))",
    "make_tensordict": "TensorDict({'a': x}, batch_size=[3, 4])",
    "TensorDictBase TensorCollection": "TensorDict",
    "NonTensorData MetaData": "Static('train')",
    "NonTensorStack": "TensorDict({'n': ObjectArray(['a', 'b'])}, [2])",
    "TypedTensorDict": "tdc.interop.check(td, tdc.interop.spec(td))",
    "TensorDictModule WrapModule": "td = td.set('z', torch.relu(td['a']))",
    "TensorDictSequential": "run = lambda td: td.set('z', td['a'] + 1).set('y', td['e'] * 2); run(td)",
    "ProbabilisticTensorDictModule ProbabilisticTensorDictSequential": "torch.distributions, in a function",
    "EnsembleModule": "stacked = tdc.stack_modules([net, net])",
    "CudaGraphModule": "torch.compile(fn, mode='reduce-overhead')",
    "MemoryMappedTensor PersistentTensorDict memmap": MAPPED,
    "is_tensor_collection": "isinstance(x, TensorDict)",
    "is_tensorclass": "isinstance(x, tdc.TensorClass)",
    "is_non_tensor": "not isinstance(x, torch.Tensor)",
    "assert_close assert_allclose_td": "tdc.testing.assert_close(td, other)",
    "set_lazy_legacy lazy_legacy set_list_to_stack list_to_stack set_interaction_type set_skip_existing":
        "no global settings: each would be a guard of every graph",
    "unravel_key_list unravel_key_to_tuple": "tdc.unravel_key(key)",
    "nested_tensor as_nested_tensor": "tdc.pack(tensors)",
    "PNTensor": "collate_fn=tdc.pack",
    "jit": "torch.compile(fn, fullgraph=True)",
    "masked": "tdc.MaskedBatch(data, lengths), or tdc.from_padded(data, mask=mask)",
}  # fmt: skip
MOVED = {  # names that were elsewhere, by the module that has them now
    "tdc.interop": "from_hf to_hf PytreeSpec from_pytree to_pytree from_state_dict to_state_dict infer_batch_size "
                   "to_dataclass to_namedtuple to_struct_array register_leaf Spec LeafSpec spec check zeros",
    "tdc.data": "collate pad_sequence ragged_stack unpad_sequence group_by",
    "tdc.nn": "TensorDictParams",
    "tdc.optim": "global_norm",
    "tdc": "cond while_loop scan associative_scan from_module functional_call stack_modules ensemble vmap grad "
           "value_and_grad jvp vjp jacfwd jacrev hessian",
}  # fmt: skip
HOMES = {name: f"{home}.{name}" for home, names in MOVED.items() for name in names.split()}
EARLIER: dict[str, dict[str, str]] = {  # names that a module had
    "tdc": CUT | {name: path for name, path in HOMES.items() if path != f"tdc.{name}"},
    "tdc.compile": {name: path for name, path in HOMES.items() if path == f"tdc.{name}"} | {"map": "tdc.scan_map"},
}
MODULES = {"tdc": MODULE | EARLIER["tdc"], nn.__name__: MODULE, "tdc.compile": EARLIER["tdc.compile"]}


class Other(Absent):
    """Descriptor of a class for a name of another library."""

    __slots__ = ("instead",)

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name)
        self.instead = instead

    def __get__(self, x: Any, owner: Any = None) -> NoReturn:
        raise error_of(text_of(self.name, CLASS_NAMES[owner._kind], self.instead))


def text_of(name: str, owner: str, instead: str) -> str:
    """The message for a missing name."""
    expected = "no change in place" if name.endswith("_") else f"a name of {owner}"
    return message(name, expected, f"{owner}.{name}", hint=instead)


def each(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs of name and replacement."""
    for names, instead in table.items():
        for name in names.split():
            yield name, instead


def instead(name: str, owner: type = TensorDict) -> str:
    """The replacement of a name of a class or the module, as docs/migration.md shows it.

    Example:
        >>> instead("rename_key_")
        "td = td.rename_keys({'a': 'z'})"
    """
    return {**dict(each(MODULE)), **dict(each(INSTEAD[owner]))}[name]


def getter(module: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module; an ImportError in `from tdc import name`, which drops the text of other errors."""
    table = dict(each(MODULES.get(module, {})))

    def __getattr__(name: str) -> NoReturn:
        hint = table.get(name) or ("" if name[0] == "_" else nearest(name, sys.modules[module]))
        if hint:
            text = text_of(name, module, hint)
            importing = extract_stack(limit=2)[0].name == "_handle_fromlist"  # Python's own
            raise ImportError(text, name=module) if importing else MethodError(text)
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])

    return __getattr__


def nearest(name: str, module: ModuleType) -> str:
    """The public name of a module, or for tdc of the modules in it, closest to a misspelt one; empty without one."""
    spaces = [module, compiled, data, interop, io] if module is sys.modules["tdc"] else [module]
    spelt = {n.lower().replace("_", ""): f"{m.__name__}.{n}" for m in reversed(spaces) for n in public(m)}
    exact = [f"{m.__name__}.{name}" for m in spaces if name in public(m)]
    if exact:
        return exact[0]
    found = get_close_matches(name.lower().replace("_", ""), spelt, 1, 0.8)
    return spelt[found[0]] if found else ""


def lister(module: ModuleType, *spaces: str) -> Callable[[], list[str]]:
    """`__dir__` of a module: its public names and submodules."""
    return lambda: sorted([*public(module), *spaces])


def public(module: ModuleType) -> list[str]:
    """Public names of a module."""
    return [n for n, x in vars(module).items() if n[0] != "_" and not isinstance(x, ModuleType)]


class Named(ModuleType):
    """A module whose call, as in `tdc.compile(fn)`, is an error with a hint."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        called = self.__name__.removeprefix("tdc.")
        raise DtypeError(message(called, f"a function, {self.__name__} is a module", "a call", hint=CALLED[called]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name; cloudpickle does so only for modules without their own class."""
        return import_module, (self.__name__,)


CALLED = {
    "compile": "torch.compile(fn, fullgraph=True), or tdc.compile.train_step(loss, optimizer)",
    "data": "tdc.data.Loader(dataset, ...)",
    "interop": "tdc.as_tensordict(obj)",
    "io": "tdc.io.save(td, path), td = tdc.io.load(path)",
    "nn": "tdc.nn.TensorDictParams(td), torch.nn for layers",
    "optim": "tdc.optim.adam(lr=1e-3)",
}
for _cls, _table in INSTEAD.items():
    for _name, _instead in each(_table):
        setattr(_cls, _name, Other(_name, _instead))
SPACES = (compiled, data, dist, hf, interop, io, nn, ops, optim, testing)
vars(sys.modules["tdc"])["__getattr__"] = getter("tdc")
vars(sys.modules["tdc"])["__dir__"] = lister(sys.modules["tdc"], *[m.__name__.removeprefix("tdc.") for m in SPACES])
for _module in SPACES:
    vars(_module)["__dir__"] = lister(_module)
for _module in (compiled, data, dist, interop, io, nn, optim):
    vars(_module)["__getattr__"] = getter(_module.__name__)
    _module.__class__ = Named
