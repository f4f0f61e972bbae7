"""Finds what reaches into private parts of torch, or into the caller, outside the few files that may.

A name is torch's where it is imported from torch or assigned from such a name (`fx: Any = torch.fx`). An attribute
that begins with an underscore is private to somebody else where no file of `tdc` defines one of that name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .tree import Module, Tree, absolute, name_of

TORCH_PLACES = (  # all that is private to torch
    *("tdc/core/dynamo.py", "tdc/core/levels.py", "tdc/core/torch_functions.py", "tdc/compile/_torch/"),
)
DIRECT = {  # not found by `find`: read in code that Dynamo traces, by getattr with another answer, or documented
    *("torch._dynamo", "torch._higher_order_ops", "torch._C", "torch._C._cuda_getCurrentRawStream"),
    "torch.autograd.forward_ad._current_level",
    *("torch._check", "torch._ops", "torch._assert_async"),
}
FINDER = "tdc/core/private.py"  # through which all of it is found
PYTREE_PLACE, PYTREE = "tdc/core/pytree.py", "torch.utils._pytree"
BY_NAME = {"resolve_name", "import_module", "__import__"}
GETTERS = {"getattr", "hasattr", "setattr", "delattr"}
NEVER = {  # in no file at all
    "sys": {"_getframe", "_current_frames", "setprofile", "settrace"},
    "inspect": {"currentframe", "stack", "trace"},
    "gc": {"disable"},
}
MARK = re.compile(r"_(torch)?dynamo_\w+")
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*[.:]__?\w+(?<!__)([.:]\w+)*")
DOCUMENTED = {  # private names that documentation gives: of named tuples, where nn.Module keeps what it has, and by
    # which transformers' guide to adding models has them look up their attention
    *("_replace", "_asdict", "_fields", "_make", "_field_defaults"),
    *("_parameters", "_buffers", "_modules"),
    "_attn_implementation",
}


def private(name: str) -> bool:
    """Whether a name is private: one or two underscores in front, and none of Python's own behind."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def may(module: Module, path: str) -> bool:
    """Whether a module may use a dotted path of torch that has a private part."""
    if any(module.path.startswith(place) for place in TORCH_PLACES):
        return True
    return module.path == PYTREE_PLACE and path.startswith(PYTREE)


def torch_names(module: Module) -> dict[str, str]:
    """Names of a module that stand for a part of torch, by its dotted path."""
    names: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and absolute(module, node).partition(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{absolute(module, node)}.{alias.name}" for alias in node.names}
    known = -1
    while known != len(names):  # aliases of aliases
        known = len(names)
        for node in ast.walk(module.tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            path = dotted(getattr(node, "value", None), names)
            if path and isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
                names |= {t.id: path for t in targets if isinstance(t, ast.Name) and t.id not in names}
    return names


def dotted(node: ast.AST | None, names: dict[str, str]) -> str:
    """The path of torch that an expression stands for; empty where it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Call) and name_of(node.func) in GETTERS and len(node.args) > 1:
        base, key = dotted(node.args[0], names), beginning(node.args[1])
        return f"{base}.{key}" if base and key else ""
    if isinstance(node, ast.Subscript):  # vars(torch)["_C"], torch.__dict__["_C"]
        holder = node.value
        if isinstance(holder, ast.Call) and name_of(holder.func) == "vars" and holder.args:
            holder = holder.args[0]
        base, key = dotted(holder, names), beginning(node.slice)
        return f"{base}.{key}" if base and key else ""
    return ""


def beginning(node: ast.AST) -> str:
    """What a string begins with, an f-string too."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return beginning(node.values[0]).removeprefix("__")  # f"__{name}__" is one of Python's own
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the strings that are statements of their own."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def own_private_names(tree: Tree) -> set[str]:
    """Private names that some file of tdc defines: functions, slots, fields, what is assigned, keys of tables."""
    found = set(DOCUMENTED)
    for module in tree.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Dict):  # a table of methods
                found |= {beginning(key) for key in node.keys if key is not None}
            elif isinstance(node, ast.Assign) and name_of(node.targets[0]) == "__slots__":
                found |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    return found


def check_internals(tree: Tree) -> list[str]:
    """What is private to torch is named in `core/dynamo.py`, `core/levels.py`, `core/torch_functions.py` and
    `compile/_torch/` alone, torch's pytrees in `core/pytree.py`, and nothing looks at the frames of its callers or
    turns the garbage collector off."""
    own = own_private_names(tree)
    problems = []
    for module in tree.modules.values():
        for line, text in sorted(set(private_uses(module, own))):
            problems.append(f"{module.path}:{line}: {text}")
    return problems


def private_uses(module: Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines of a module, and what is private in them."""
    names, texts = torch_names(module), docstrings(module.tree)
    free = any(module.path.startswith(place) for place in TORCH_PLACES)
    for node in ast.walk(module.tree):
        line = getattr(node, "lineno", 0)
        yield from ((line, text) for text in forbidden_everywhere(node))
        for path, parts in paths_of(module, node, names):
            if any(private(part) for part in parts) and not may(module, path):
                yield line, f"{path} is private to torch"
            elif free and any(private(part) for part in parts) and path not in DIRECT:
                yield line, f"{path} may be gone in another torch: let core/private.py find it"
        if free:
            continue
        if isinstance(node, ast.Compare | ast.Attribute) and "torch.__version__" in [
            dotted(n, names) for n in ast.iter_child_nodes(node)
        ]:
            yield line, "asks for torch's version; ask for the feature"
        if isinstance(node, ast.Attribute):
            if MARK.fullmatch(node.attr):
                yield line, f"{node.attr} is a mark of Dynamo's"
            elif private(node.attr) and node.attr not in own and not dotted(node, names):
                yield line, f"{node.attr} is a private name of another library"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if MARK.fullmatch(node.value):
                yield line, f"{node.value!r} is a mark of Dynamo's"
            elif PRIVATE_MODULE.fullmatch(node.value) and not may(module, node.value):
                yield line, f"{node.value!r} names a private part of torch"
        elif isinstance(node, ast.Call):
            yield from ((line, text) for text in by_name(module, node, own))


def paths_of(module: Module, node: ast.AST, names: dict[str, str]) -> list[tuple[str, list[str]]]:
    """The paths of torch that a node imports or names, with the parts that it adds: all, or the last."""
    found: list[str] = []
    if isinstance(node, ast.Import):
        found = [a.name for a in node.names if a.name.partition(".")[0] == "torch"]
    elif isinstance(node, ast.ImportFrom) and absolute(module, node).partition(".")[0] == "torch":
        found = [f"{absolute(module, node)}.{a.name}" for a in node.names]
    elif isinstance(node, ast.Attribute | ast.Call | ast.Subscript) and (path := dotted(node, names)):
        return [(path, path.split(".")[-1:])]
    return [(path, path.split(".")) for path in found]


def by_name(module: Module, node: ast.Call, own: set[str]) -> Iterator[str]:
    """Modules and attributes that a call finds by their names."""
    called, args = name_of(node.func), node.args
    if called == "resolve_name" and module.path != FINDER:
        yield "resolve_name finds modules by name; import them, or ask compile/_torch"
    if called in BY_NAME and args and beginning(args[0]).partition(".")[0] == "torch":
        yield f"{called} loads a part of torch by name"
    if called in GETTERS and len(args) > 1 and private(key := beginning(args[1])) and key not in own:
        yield f"{called} of {key!r}, a private name of another library"


def forbidden_everywhere(node: ast.AST) -> Iterator[str]:
    """Frames of callers, and the garbage collector's switch."""
    if isinstance(node, ast.Attribute) and node.attr in NEVER.get(name_of(node.value), ()):
        yield f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{a.name}" for a in node.names if a.name in NEVER.get(node.module or "", ()))
