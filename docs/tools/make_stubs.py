"""Writes the stubs of the methods that no class body shows: those of the rules, and those of the tables of methods.

    tdc/ragged/operations.pyi        RaggedOperations, and what NestedTensor and MaskedBatch have besides
                                     TwoLevelOperations
    tdc/tensordict/operations.pyi    TensorDictOperations

For type checkers these classes are bases of the containers; at run time there is no such module. A method of an
operation has the parameters that torch's own stub gives it, without `out`; where torch has a Tensor it takes a
container, too. Its result is the container, a tuple of containers, or what torch says where that is no tensor. Where
the kind of a result depends on the dim, as in reductions of ragged batches, it is `Any`.

python docs/tools/make_stubs.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tdc import MaskedBatch, NestedTensor, TensorDict
from tdc.core.rules import DISPATCH, RULES, Rule
from tdc.ops.two_level import TWO_LEVEL_RULES
from tdc.ragged import TwoLevelTensor

ROOT = Path(__file__).resolve().parents[2]
RAGGED, DICTS = ROOT / "tdc" / "ragged" / "operations.pyi", ROOT / "tdc" / "tensordict" / "operations.pyi"
RELEASE = ".".join(torch.__version__.split(".")[:2])
HEAD = f'''\
# Written by docs/tools/make_stubs.py for torch {RELEASE}; a test fails when it is out of date.
# fmt: off
# ruff: noqa
"""{{}}, for type checkers: there is no such module at run time."""
'''
NAMES = {  # of torch's stub; a size that varies in a graph is an int for type checkers
    "_dtype": "torch.dtype", "_layout": "torch.layout", "_device": "torch.device", "_size": "Sequence[_int]",
    "Number": "_float", "SymInt": "_int", "SymBool": "_bool", "Device": "torch.device",
    "memory_format": "torch.memory_format", "Generator": "torch.Generator",
    "DeviceLikeType": "torch.device | str | _int", "int": "_int", "float": "_float", "bool": "_bool",
    "complex": "_complex",
}  # fmt: skip
BUILTIN = re.compile(r"(?<![\w.])(int|float|bool|complex)(?!\w)")  # methods have these names: torch's aliases serve
KNOWN = ("Any", "Callable", "Literal", "Sequence", "list", "str", "tuple")
ALIASES = ("_bool", "_complex", "_float", "_int")
TYPING = ("Any", "Generic", "Literal", "NamedTuple", "Self", "TypeVar", "overload")
IMPORTS = {
    "Callable": "from collections.abc import Callable",
    "Sequence": "from collections.abc import Sequence",
    **{
        n: f"from typing import {n}" for n in ("Any", "Generic", "Literal", "NamedTuple", "Self", "TypeVar", "overload")
    },
    "torch": "import torch",
    "Tensor": "from torch import Tensor",
}
ALONG = {"extremes", "moments", "order_statistics", "reduction", "vector_norm"}  # over a ragged dim the rest is dense
OPEN = {
    "baddbmm", "bmm", "det", "gather", "logdet", "matmul", "mm", "mv", "narrow", "new_full", "new_ones", "new_zeros",
    "select", "slogdet", "take", "take_along_dim", "topk", "trace", "unique", "unique_consecutive",
}  # fmt: skip
LEVELS = ("flatten", "unflatten", "index_select", "split", "chunk", "split_with_sizes")  # may leave one of two levels
DENSE = ("addbmm", "bincount", "corrcoef", "cov", "dist", "dot", "new_empty", "new_empty_strided", "new_tensor", "vdot")
WIDER = {"unflatten": ("sizes: Sequence[_int]", "sizes: Sequence[_int] | Tensor | Self")}  # than torch's parameters
QUOTED = re.compile(r"(?<=: |> )'([^']*)'")  # annotations as `inspect` writes them
Function = ast.FunctionDef


def methods_of_torch() -> dict[str, list[Function]]:
    """Signatures of `torch.Tensor`, all overloads: of the stub, else of the class itself."""
    folder = Path(torch.__file__).parent
    found: dict[str, list[Function]] = {}
    for file, name in (("_C/__init__.pyi", "TensorBase"), ("_tensor.py", "Tensor")):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
        known = set(found)
        for node in body:
            if isinstance(node, Function) and node.name not in known:
                found.setdefault(node.name, []).append(node)
    return found


class Translated(ast.NodeTransformer):
    """An annotation of torch's stub in names that users know, a container in place of a Tensor."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "Tensor":
            return expression(self.tensor)
        return expression(NAMES.get(node.id, node.id if node.id in KNOWN + ALIASES else "Any"))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        parts = dict.fromkeys(ast.unparse(self.visit(x)) for x in (node.left, node.right))
        names = dict.fromkeys(name for part in parts for name in part.split(" | "))  # a union has no brackets around it
        small = {"_complex": ("_int", "_float"), "_float": ("_int",)}
        drop = {"Any"} | {less for name in names for less in small.get(name, ())}
        return expression(" | ".join([name for name in names if name not in drop]) or "Any")

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        text = ast.unparse(node)
        if text.startswith("torch.return_types."):
            return expression(f"{result_class(node.attr)}[{self.tensor}]")
        return (
            node
            if text in ("torch.dtype", "torch.device", "torch.layout", "torch.memory_format")
            else expression("Any")
        )


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


RESULTS: dict[str, tuple[str, ...]] = {}  # classes of results by name, and their fields


def result_class(name: str) -> str:
    """The class that stands for one of `torch.return_types`: its results have the same fields."""
    fields = getattr(torch.return_types, name).__match_args__
    title = "_" + "".join([field.title().replace("_", "") for field in fields])
    RESULTS[title] = fields
    return title


def translated(node: ast.expr | None, tensor: str) -> str:
    """The text of an annotation."""
    return "Any" if node is None else ast.unparse(Translated(tensor).visit(expression(ast.unparse(node))))


def parameters(fn: Function, tensor: str) -> str:
    """All but `out`, with their defaults."""
    args = fn.args

    def one(arg: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        text = f"{stars}{arg.arg}"
        if arg.arg != "self":
            text += f": {translated(arg.annotation, tensor)}"
        return text if default is None else f"{text} = {ast.unparse(default)}"

    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    out = [one(a, d) for a, d in zip(plain, defaults, strict=True) if a.arg != "out"]
    if args.posonlyargs:
        out.insert(len(args.posonlyargs), "/")
    keyed = [one(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if a.arg != "out"]
    if args.vararg:
        out.append(one(args.vararg, None, "*"))
    elif keyed:
        out.append("*")
    return ", ".join(out + keyed + ([one(args.kwarg, None, "**")] if args.kwarg else []))


def result_of(rule: Rule, fn: Function) -> str:
    """Type of the result of a method."""
    names = {arg.arg for arg in (*fn.args.posonlyargs, *fn.args.args, *fn.args.kwonlyargs)}
    tensor = "Self"
    if rule.kind == "tensordict" and rule.name in ("all", "any"):
        return "Any" if "dim" in names else "Tensor"
    if rule.kind != "tensordict":
        if rule.name in DENSE or (rule.family in ALONG and not names & {"dim", "other"}):
            tensor = "Tensor"
        elif rule.name in (*OPEN, *LEVELS * (rule.kind == "two_level")) or (rule.family in ALONG and "dim" in names):
            tensor = "Any"
    if rule.family == "join":
        return f"tuple[{tensor}, ...]"
    if fn.returns is None:
        return "Any" if rule.family == "linalg" else tensor
    return translated(fn.returns, tensor)


def operation(name: str, rule: Rule, torchs: list[Function]) -> list[str]:
    """The overloads of one method."""
    operand = "Tensor | Container" if rule.kind == "tensordict" else "Tensor | Self"
    if name.startswith("__"):
        other = "" if name in ("__neg__", "__pos__", "__abs__", "__invert__") else f", other: {operand} | _complex"
        result = "Any" if rule.name in OPEN and rule.kind != "tensordict" else "Self"
        note = "  # type: ignore[override]" if name in ("__eq__", "__ne__") else ""
        return [f"def {name}(self{other}) -> {result}: ...{note}"]
    named = [fn for fn in torchs if "EllipsisType" not in ast.unparse(fn.args)]
    texts = [f"def {name}({parameters(fn, operand)}) -> {result_of(rule, fn)}: ..." for fn in named]
    if rule.kind != "tensordict":
        texts = [text.replace(*WIDER.get(name, ("", ""))) for text in texts]
    return list(dict.fromkeys(texts)) or [f"def {name}(self, *args: Any, **kwargs: Any) -> Self: ..."]


def function(name: str, fn: Any, needed: dict[str, str]) -> str:
    """A function of one of the tables as a method; what its annotations name is needed."""
    signature = inspect.signature(fn)
    first, *rest = signature.parameters.values()
    own, result = first.annotation, signature.return_annotation
    if own not in ("TensorDict", "Any"):  # an operation may turn a class into that, and an index anything into anything
        result = {own: "Self", f"{own} | None": "Self | None"}.get(result, result)
    for annotation in (*[p.annotation for p in rest], result):
        for word in re.findall(r"(?<![\w.])[A-Za-z_]\w*", str(annotation)):
            value = fn.__globals__.get(word)
            if value is not None and word not in IMPORTS:
                home = value.__module__ if isinstance(value, type) else fn.__module__
                needed[word] = f"from {home} import {word}"
    typed = [p.replace(annotation=BUILTIN.sub(r"_\1", str(p.annotation))) for p in rest]
    shown = signature.replace(
        parameters=[inspect.Parameter("self", first.kind), *typed], return_annotation=BUILTIN.sub(r"_\1", result)
    )
    return f"def {name}" + QUOTED.sub(r"\1", str(shown)) + ": ..."


INDEXED = (  # an example, some of them, and whatever else an index may name
    "def __getitem__(self, index: _int) -> Tensor: ...",
    "def __getitem__(self, index: slice | list[_int]) -> Self: ...",
    "def __getitem__(self, index: Any) -> Any: ...",
)


def attached(cls: type) -> Iterator[tuple[str, Any]]:
    """Members of a container that no class body holds."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        fn = value.fget if isinstance(value, property) else value
        home = getattr(fn, "__qualname__", "").rpartition(".")[0]
        if (inspect.isfunction(fn) or isinstance(value, property)) and home not in {c.__name__ for c in cls.__mro__}:
            yield name, value


def members(cls: type, needed: dict[str, str], known: Sequence[Rule] = RULES) -> dict[str, list[str]]:
    """The lines of each attached member."""
    torchs, kind = methods_of_torch(), cls._kind  # type: ignore[attr-defined]
    rules = {DISPATCH[kind][rule.op]: rule for rule in known if rule.kind == kind and not rule.reason}
    found: dict[str, list[str]] = {}
    for name, value in attached(cls):
        if isinstance(value, property):
            typed = inspect.isfunction(value.fget) and "return" in value.fget.__annotations__
            line = function(name, value.fget, needed) if typed else f"def {name}(self) -> Self: ..."
            found[name] = ["@property", line]
        elif value.__code__.co_qualname.startswith(("as_method", "as_operator")):
            op = inspect.getclosurevars(value).nonlocals["op"]
            rule = rules.get(DISPATCH[kind].get(op, ""))
            if rule is not None:
                lines = operation(name, rule, torchs.get(name, []))
                found[name] = lines if len(lines) == 1 else [x for line in lines for x in ("@overload", line)]
        elif name == "__getitem__":
            found[name] = [x for line in INDEXED for x in ("@overload", line)]
        else:
            found[name] = [function(name, value, needed)]
    return found


def page(title: str, classes: dict[str, tuple[str, dict[str, list[str]]]], needed: dict[str, str]) -> str:
    """The text of a stub."""
    body = ""
    for name, (base, lines) in classes.items():
        body += f"\nclass {name}({base}):\n    __slots__ = ()\n"
        body += "".join([f"    {line}\n" for key in sorted(lines) for line in lines[key]])
        if "__eq__" in lines:
            body += "    def __hash__(self) -> _int: ...\n"
    results = {n: fields for n, fields in sorted(RESULTS.items()) if f"{n}[" in body}
    for name, fields in reversed(results.items()):
        body = f"\nclass {name}(NamedTuple, Generic[T]):\n" + "".join([f"    {field}: T\n" for field in fields]) + body
    body = ('\nT = TypeVar("T")\n' if results else "") + body
    used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", body))
    imports: dict[str, list[str]] = {}
    for name, line in sorted((IMPORTS | needed).items()):
        if name in used:
            imports.setdefault(line.partition("import ")[0], []).append(name)
    lines = [f"{start}import {', '.join(names)}\n" for start, names in sorted(imports.items())]
    named = [f"{name} = {name[1:]}\n" for name in ALIASES if name in used]
    return HEAD.format(title) + "\n" + "".join([*lines, "\n", *named]) + body


def render() -> dict[Path, str]:
    """The stubs by path."""
    needed = {"Container": "from tdc.core.container import Container"}
    nested, masked = members(NestedTensor, needed), members(MaskedBatch, needed)
    both = {name: lines for name, lines in nested.items() if masked.get(name) == lines}
    ragged: dict[str, Any] = {"RaggedOperations": ("Container", both)}
    for name, own in (("NestedOperations", nested), ("MaskedOperations", masked)):
        ragged[name] = "RaggedOperations", {key: lines for key, lines in own.items() if key not in both}
    ragged["TwoLevelOperations"] = "Container", members(TwoLevelTensor, needed, TWO_LEVEL_RULES)
    text = page("Methods of NestedTensor, MaskedBatch and TwoLevelTensor", ragged, needed)
    needed = {
        "Container": "from tdc.core.container import Container", "Keyed": "from tdc.tensordict.mapping import Keyed",
    }  # fmt: skip
    dicts = {"TensorDictOperations": ("Keyed", members(TensorDict, needed))}
    return {RAGGED: text, DICTS: page("Methods of TensorDict", dicts, needed)}


if __name__ == "__main__":
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
