"""TensorDictParams: a TensorDict of parameters as an `nn.Module`.

    params = TensorDictParams(td)       named_parameters, state_dict, .to, optimisers, DDP: as of any module
    params.td                           the TensorDict, with the Parameters themselves as leaves

Each inner node is a submodule that holds only tensors, so names have dots between keys, and `.to()`, `deepcopy`,
`pickle` and `load_state_dict` are torch's own. `td` is built from the submodules on each access.

Invariants:
  - `params.td` has the keys in order, the batch size and the classes of nodes of the original TensorDict;
  - a leaf under two keys is one Parameter under both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tdc.core.arguments import keys_of
from tdc.core.errors import DtypeError, KeyPathError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import as_path, missing_key, parts, show
from tdc.core.typing import KeyPath, NestedKey
from tdc.tensordict.paths import join, within
from tdc.tensordict.tensordict import TensorDict, build_td


class TensorDictParams(nn.Module):
    """A module that holds the leaves of a TensorDict: floating-point ones as parameters, others as buffers.

    Args:
        td: leaves are tensors. Memory is shared; Parameters stay the same objects.
        buffers: keys of leaves or inner nodes that become buffers, such as running statistics:
            `tdc.from_module(net, params=False).keys(True, True)`.

    Raises:
        DtypeError: td is not a TensorDict.
        UnsupportedError: leaves that are not tensors.
        KeyPathError: keys with a dot, which separates keys in names of parameters; an unknown key in `buffers`.

    Compile:
        fullgraph; `params.td` costs no more than the parameters of a module.

    Example:
        >>> import torch
        >>> params = TensorDictParams(TensorDict({"fc": {"weight": torch.ones(1, 2)}, "step": torch.tensor(0)}))
        >>> [name for name, _ in params.named_parameters()], list(params.state_dict())
        (['fc.weight'], ['step', 'fc.weight'])
        >>> params.td["fc", "weight"]
        Parameter containing:
        tensor([[1., 1.]], requires_grad=True)

    Source:
        RFC torch.dict.TensorDict; `nn.ParameterDict`.
    """

    def __init__(self, td: TensorDict, *, buffers: Iterable[NestedKey] = ()) -> None:
        super().__init__()
        if not isinstance(td, TensorDict):
            hint = "TensorDictParams(tdc.from_module(module)), TensorDictParams(TensorDict(dict))"
            raise DtypeError(message("nn.TensorDictParams", "a TensorDict", describe(td), hint=hint))
        leaves = td._leaves
        check(leaves)
        named = keys_of("nn.TensorDictParams", [buffers] if isinstance(buffers, str) else buffers)
        kept = [as_path(key, "nn.TensorDictParams") for key in named]
        for path in kept:
            if path not in td:
                raise missing_key("nn.TensorDictParams", path, leaves)
        self._paths = tuple(leaves)
        self._nodes, self._size = td._nodes, td._size
        held: dict[int, Any] = {}
        for path, leaf in leaves.items():
            is_buffer = any([within(path, p) for p in kept]) or not (leaf.is_floating_point() or leaf.is_complex())
            *nodes, name = parts(path)
            owner = owner_of(self, nodes)
            if is_buffer:
                owner._buffers[name] = held.setdefault(id(leaf), leaf.detach())
            elif isinstance(leaf, nn.Parameter):
                owner._parameters[name] = leaf
            else:
                new = held[id(leaf)] if id(leaf) in held else nn.Parameter(leaf.detach())
                owner._parameters[name] = held[id(leaf)] = new

    @property
    def td(self) -> TensorDict:
        """The current TensorDict; its leaves are the Parameters and buffers themselves."""
        found: dict[KeyPath, Any] = {}
        gather(self, (), found)
        return build_td({path: found[path] for path in self._paths}, self._nodes, self._size)

    def forward(self) -> TensorDict:
        """`td`, for wrappers that hook calls, such as DistributedDataParallel."""
        return self.td

    def __getitem__(self, key: Any) -> Any:
        """The Parameter, buffer or inner TensorDict at a key, or a TensorDict of indexed batch dims."""
        return self.td[key]

    def __repr__(self) -> str:
        return f"TensorDictParams({self.td!r})"

    def _repr_html_(self) -> str:
        return self.td._repr_html_()

    def _ipython_key_completions_(self) -> list[Any]:
        return self.td._ipython_key_completions_()


def check(leaves: dict[KeyPath, Any]) -> None:
    """Refuse leaves that are not tensors and keys with dots; all are named."""
    odd = {show(p): describe(x) for p, x in leaves.items() if not isinstance(x, Tensor)}
    hint = "hold the tensor inside, x.values or x.data, and build the batch where it is used"
    refuse_wrong(UnsupportedError, "nn.TensorDictParams", "leaves that are tensors", odd, "others", hint)
    dotted = [repr(p) for p in leaves if any(["." in key or not key for key in parts(p)])]
    hint = "td.unflatten_keys('.') makes inner nodes of them"
    refuse_wrong(KeyPathError, "nn.TensorDictParams", "keys without dots", dotted, "others", hint)


def owner_of(module: nn.Module, path: list[str]) -> nn.Module:
    """The module of an inner node, made if missing; not by `add_module`, which refuses names like "to"."""
    for key in path:
        children: dict[str, Any] = module._modules
        module = children.setdefault(key, nn.Module())
    return module


def gather(module: Any, prefix: KeyPath, found: dict[KeyPath, Any]) -> None:
    """Collect the tensors of a module and its submodules by path."""
    for store in (module._parameters, module._buffers):
        for name, x in store.items():
            found[join(prefix, name)] = x
    for name, child in module._modules.items():
        gather(child, join(prefix, name), found)
