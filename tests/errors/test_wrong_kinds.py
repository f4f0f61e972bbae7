"""Every public function, each argument in turn given a list, a dict, None, a tensor, an array, a text or a number.

`CALLS` has one sound call of each function, and a test that none is missing. What is given instead is taken, or refused
in our three parts; a Python error from inside (`'list' object has no attribute 'values'`) says nothing to a newcomer.
"""

from __future__ import annotations

import atexit
import inspect
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc import DtypeError, MaskedBatch, NestedTensor, TdcError, TensorDict
from tdc.ragged import TwoLevelTensor

SPACES = ("tdc", "tdc.compile", "tdc.data", "tdc.interop", "tdc.io", "tdc.nn", "tdc.optim", "tdc.ragged", "tdc.testing")
METHODS: tuple[Any, ...] = (  # which are functions, too
    NestedTensor.to_padded, NestedTensor.to_torch, MaskedBatch.to_packed, TensorDict.summary, TwoLevelTensor.to_padded,
)  # fmt: skip
MADE_BY_US = {  # records, and what takes nothing but settings or has a test of its own
    "Spec", "LeafSpec", "LoadReport", "PytreeSpec", "Summary", "TensorClass", "Counts", "Exported", "Report",
    "Signature", "TrainStep", "LossScale", "Optimizer", "Transform", "Static", "backend", "assert_one_graph",
    "check_rule", "forbid", "assert_close", "Loader", "expose_tensors", "sharded",
    "from_arrow", "to_arrow", "from_parquet", "to_parquet", "to_dataset", "Writer", "writer",
}  # fmt: skip
WRONG: dict[str, Any] = {
    "list": [1, 2], "dict": {"a": 1}, "None": None, "tensor": torch.zeros(3, 2), "array": np.zeros((3, 2)),
    "str": "abc", "int": 3, "object": object(),
}  # fmt: skip
HANDED_ON = {  # arguments that go to the user's function, which has errors of its own
    "cond": 3, "export": 1, "functional_call": 2, "peak_bytes": 1, "report": 1, "scan": 1, "save": 1,
    "memmap_empty": 1, "to_safetensors": 1, "dcp_save": 1,  # of these, a path to write to
}  # fmt: skip
FORM = re.compile(r"tdc\.[\w.]+: expected .*, got .*(\nat .*)*\nhint: .+", re.DOTALL)


@dataclass
class Record:
    x: Tensor


class Pair(NamedTuple):
    x: Tensor


def td() -> TensorDict:
    return TensorDict({"x": torch.zeros(3, 2), "id": torch.zeros(3, 2)}, [3])


def rows() -> NestedTensor:
    return tdc.pack([torch.ones(2), torch.ones(3)])


def square(x: Any) -> Any:
    return (x * x).sum()


def loss(params: TensorDict, batch: Tensor) -> Tensor:
    return square(params["weight"])


NET, PARAMS = nn.Linear(2, 2), tdc.from_module(nn.Linear(2, 2))
tree, spec = tdc.interop.from_pytree([torch.zeros(3)])
X = torch.zeros(3, 2)
W = torch.ones(2, requires_grad=True)
FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
STORE = f"{FOLDER.name}/store"
tdc.io.save(td(), STORE)
tdc.io.to_safetensors(td(), f"{STORE}.safetensors")
tdc.io.dcp_save(td(), f"{STORE}.dcp")
CALLS: dict[str, tuple[Any, ...]] = {
    "TensorDict": (td(), [3]),
    "NestedTensor": (torch.ones(5), torch.tensor([0, 2, 5])),
    "TwoLevelTensor": (rows(), torch.tensor([0, 2])),
    "TwoLevelPadded": (torch.zeros(1, 2, 3), torch.tensor([2]), torch.tensor([[2, 3]])),
    "pad_levels": (tdc.pack([rows()]), 0.0, {"length": (5, 5)}),
    "MaskedBatch": (X, torch.tensor([1, 2, 0])),
    "ObjectArray": (["a", "b"], [2]),
    "Shared": (X,),
    "BucketSampler": ([3, 1, 2], 2, {"window": 2, "shuffle": True, "seed": 0, "drop_last": False, "rank": 0}),
    "Dataset": (td(), ["x"]),
    "TokenBudgetSampler": ([3, 1, 2], 4, {"shuffle": True, "seed": 0, "drop_last": False, "rank": 0, "world_size": 1}),
    "KVCache": (X[:, None, None], X[:, None, None], torch.ones(len(X), dtype=torch.int64)),
    "TensorDictParams": (PARAMS,),
    "as_tensordict": (Record(X), [3]),
    "autograd_grad": (W + W, W, torch.ones(2), {"retain_graph": True}),
    "assert_batched_equal": (square, [X], {"in_dims": 0, "lowers": "while", "backends": ()}),
    "associative_scan": (torch.add, X, 0, {"combine_mode": "generic"}),
    "batch": (square,),
    "cat_keys": (td(), ["x", "id"], "z", -1),
    "check": (td(), tdc.interop.spec(td())),
    "collate": ([td()[0], td()[1]],),
    "cond": (torch.tensor(True), torch.neg, torch.abs, (X,)),
    "copy_": (td(), td()),
    "ensemble": (NET, torch.stack([PARAMS, PARAMS])),
    "from_buffer": (*tdc.io.to_buffer(td()), {"classes": ()}),
    "from_dlpack": ({"x": np.zeros((3, 2))}, [3]),
    "from_hf": ({"input_ids": X.long(), "attention_mask": torch.ones(3, 2).long()},),
    "from_list": ([[1, 2], [3]],),
    "from_module": (NET,),
    "from_numpy": ([np.zeros(2), np.zeros(3)],),
    "from_padded": (X, {"lengths": torch.tensor([1, 2, 0])}),
    "from_pytree": ([X], [3]),
    "from_state_dict": (NET.state_dict(), []),
    "from_struct_array": (np.zeros(3, [("x", "f4")]), {"copy": None}),
    "from_torch": (rows().to_torch(),),
    "functional_call": (NET, PARAMS, (X,)),
    "grad": (square,),
    "group_by": (td().set("id", torch.arange(3)), "id"),
    "hessian": (square,),
    "infer_batch_size": (td(),),
    "jacfwd": (square,),
    "jacrev": (square,),
    "jvp": (square, (X,), (X,)),
    "merge": (td(), TensorDict({"y": X}, [3])),
    "nbytes": (td(),),
    "nested_like": (torch.zeros(2, 3), rows()),
    "offsets_of": (torch.tensor([1, 2]),),
    "pack": ([torch.ones(2), torch.ones(3)],),
    "pad_sequence": ([td(), td()[:2]],),
    "param_count": (td(),),
    "partition": (td(), "x"),
    "positions": (rows(),),
    "ragged_stack": ([td(), td()[:2]],),
    "ravel": (td(),),
    "register_full_backward_hook": (NET, lambda module, inputs, outputs: None),
    "register_leaf": (type("Own", (), {}), {"shape": list, "index": list}),
    "scan_map": (lambda t: t, td()),
    "scan": (lambda c, x: (c + x, x), X[0], X),
    "spec": (td(), [3]),
    "stack_keys": (td(), ["x", "id"], "z", -1),
    "stack_modules": ([NET, NET],),
    "tensorclass": (Record,),
    "to_dlpack": (td(), np.from_dlpack),
    "to_dataclass": (td().select("x"), Record),
    "to_hf": (TensorDict({"input_ids": rows()}, [2]),),
    "summary": (td(),),
    "to_namedtuple": (td().select("x"), Pair),
    "to_packed": (rows().to_padded(),),
    "to_padded": (rows(), 0.0),
    "to_pytree": (tree, spec),
    "to_state_dict": (td(),),
    "to_struct_array": (td(),),
    "to_torch": (rows(),),
    "truncate": (rows(), torch.tensor([1, 1])),
    "unbatched": (torch.neg,),
    "unpad_sequence": (tdc.data.pad_sequence([td(), td()[:2]]),),
    "unravel_key": ("x",),
    "validate": (rows(),),
    "value_and_grad": (square,),
    "vjp": (square, X),
    "vmap": (torch.neg,),
    "while_loop": (lambda x: x.sum() < 3, lambda x: (x + 1,), (torch.zeros(1),)),
    "windows": (TensorDict({"ids": rows()}, [2]), 2, "ids"),
    "zeros": (td(), [3]),
    "buckets": (1, 8),
    "Buckets": ((4, 8), (8, 16), (32,), 8),
    "checkpoint": (torch.neg,),
    "checkpoint_blocks": (torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear),
    "scan_blocks": (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.nn.Linear),
    "unscan_blocks": (torch.nn.Sequential(torch.nn.Linear(2, 2)),),
    "counted": (torch.neg,),
    "dcp_load": (f"{STORE}.dcp", "x", {"like": td(), "trusted": True, "classes": ()}),
    "dcp_save": (td(), f"{FOLDER.name}/checkpoint", {"overwrite": True}),
    "dynamic": (td(), "batch"),
    "dynamic_shapes": ([X],),
    "export": (torch.neg, (X,)),
    "load": ("no/such/file.pt2",),
    "io.load": (STORE, "x", {"mode": "r", "classes": ()}),
    "from_safetensors": (f"{STORE}.safetensors", {"mode": "r", "classes": ()}),
    "to_safetensors": (td(), f"{FOLDER.name}/packed", {"overwrite": True}),
    "save": (td(), f"{FOLDER.name}/saved", {"overwrite": True}),
    "memmap_empty": (td(), f"{FOLDER.name}/empty", [3], {"overwrite": True}),
    "lanes": (X,),
    "loader": (
        td().set("n", torch.tensor([1, 2, 1])),
        None,
        {"max_tokens": 2, "key": "n", "prefetch": 1, "pin_memory": False, "device": "cpu", "shuffle": True, "seed": 0},
    ),
    "map": (lambda t: t, td(), {"executor": None, "out": None, "progress": False}),
    "map_iter": (lambda t: t, td(), {"executor": None, "shuffle": False, "prefetch": 2}),
    "peak_bytes": (torch.neg, X),
    "report": (torch.neg, X),
    "to_buffer": (td(),),
    "to_bucket": (rows(), {"rows": (4, 8), "totals": (8, 16)}),
    "load_into": (PARAMS, NET.state_dict()),
    "lora_init": (PARAMS, 2),
    "lora_merge": (PARAMS, tdc.nn.lora_init(PARAMS, 2)),
    "lora_unmerge": (PARAMS, tdc.nn.lora_init(PARAMS, 2)),
    "train_step": (loss, tdc.optim.sgd(0.1)),
    "unbucket": (torch.zeros(4), torch.tensor([True, True, False, False])),
    "adadelta": (0.1, 0.9),
    "adafactor": (0.1, -0.8, (None, 1e-3)),
    "adagrad": (0.1,),
    "adam": (0.1, (0.9, 0.99)),
    "adamax": (0.1, (0.9, 0.99)),
    "averaged": (tdc.optim.ema(0.9).init(td()),),
    "adamw": (0.1, (0.9, 0.99)),
    "chain": (tdc.optim.clip_by_global_norm(1.0), tdc.optim.sgd(0.1)),
    "clip_by_global_norm": (1.0,),
    "clip_by_norm": (1.0,),
    "clip_by_value": (1.0,),
    "constant": (0.1,),
    "cosine": (0.1, 10),
    "from_torch_optim": (torch.optim.SGD(NET.parameters()), NET),
    "to_torch_state_dict": (tdc.optim.sgd().init(tdc.from_module(NET)), torch.optim.SGD(NET.parameters()), NET),
    "debias": (0.9, torch.tensor(1)),
    "decay": (0.1,),
    "exponential": (0.1, 0.9),
    "inject": (tdc.optim.sgd, {"lr": 0.1}),
    "inverse_sqrt": (0.1, 10),
    "join": ([tdc.optim.constant(0.1), tdc.optim.constant(0.2)], [5]),
    "lamb": (0.1, (0.9, 0.99)),
    "linear": (0.1, 0.2, 10),
    "lookahead": (5, 0.5),
    "masked": (tdc.optim.sgd(0.1), "*.bias"),
    "master_weights": (tdc.optim.sgd(0.1),),
    "multi_steps": (tdc.optim.sgd(0.1), 2),
    "muon": (0.1, 0.1),
    "nadam": (0.1, (0.9, 0.99)),
    "noise": (0.1, 0.5, 3),
    "one_cycle": (0.1, 10),
    "optim.partition": ({"*": tdc.optim.sgd(0.1)},),
    "piecewise": (0.1, [5]),
    "polynomial": (0.1, 10),
    "radam": (0.1, (0.9, 0.99)),
    "rmsprop": (0.1, 0.9),
    "schedule_free_adamw": (0.1, (0.9, 0.99)),
    "schedule_free_sgd": (0.1, 0.9),
    "skip_nonfinite": (tdc.optim.sgd(0.1),),
    "wsd": (0.1, 10, 2, 2),
    "ema": (0.9,),
    "global_norm": (td(),),
    "lion": (0.1, (0.9, 0.99)),
    "sgd": (0.1,),
}


def public() -> dict[str, Callable[..., Any]]:
    """Functions, containers and conversions that users call, by name."""
    found: dict[str, Callable[..., Any]] = {method.__name__: method for method in METHODS}
    for space in SPACES:
        for name, value in vars(sys.modules[space]).items():
            ours = getattr(value, "__module__", "").startswith("tdc") and not name.startswith("_")
            named = inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, Exception))
            if ours and callable(value) and not named:
                found.setdefault(name if found.get(name, value) is value else f"{space[4:]}.{name}", value)
    return found


def test_every_public_function_has_a_call():
    assert set(public()) - MADE_BY_US == set(CALLS)


def with_wrong(call: tuple[Any, ...], position: int, wrong: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, one of them replaced; positions count on through the named ones, a dict at the end."""
    named = dict(call[-1]) if len(call) > 1 and type(call[-1]) is dict else {}
    args = list(call[:-1] if named else call)
    if position < len(args):
        args[position] = wrong
    else:
        named[list(named)[position - len(args)]] = wrong
    return args, named


def problem(name: str, error: Exception) -> str:
    """What is wrong with an error, if anything."""
    if isinstance(error, TdcError):
        return "" if FORM.fullmatch(str(error)) else f"not in three parts: {error}"
    return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore:tdc.to_padded")  # of a length that is shorter
@pytest.mark.filterwarnings("ignore:tdc.compile.(to_bucket|unbucket) is deprecated")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_kinds(name: str):
    fn, call = public()[name], CALLS[name]
    found = []
    named = call[-1] if len(call) > 1 and type(call[-1]) is dict else ()
    for position in set(range(len(call) + max(len(named) - 1, 0))) - {HANDED_ON.get(name)}:
        for kind, wrong in WRONG.items():
            args, named = with_wrong(call, position, wrong)
            try:
                fn(*args, **named)
            except Exception as error:
                if said := problem(name, error):
                    found.append(f"argument {position}, {kind}: {said.splitlines()[0]}")
    assert not found, "\n".join(["", *found])


@pytest.mark.filterwarnings("ignore:tdc.compile.(to_bucket|unbucket) is deprecated")
def test_the_calls_are_sound():
    for name, call in CALLS.items():
        if name not in ("load", "register_leaf", "report", "export", "peak_bytes"):
            args, named = with_wrong(call, 0, call[0])
            public()[name](*args, **named)


DECORATORS = ("batch",)  # without a function they make a decorator


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if inspect.isroutine(call[0]) and name not in DECORATORS]
)
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_function_is_refused_before_it_is_called(name: str, kind: str):
    args, named = with_wrong(CALLS[name], 0, WRONG[kind])
    with pytest.raises(DtypeError, match=r"expected a (function|loss_fn)"):
        public()[name](*args, **named)


NUMBERED: list[Callable[[Any, Any], Any]] = [  # methods that take dims, sizes and numbers
    lambda x, n: x.sum(n), lambda x, n: x.var(n), lambda x, n: x.mean((1, n)), lambda x, n: x.cumsum(n),
    lambda x, n: x.transpose(1, n), lambda x, n: x.permute(0, 1, n), lambda x, n: x.movedim(1, n),
    lambda x, n: x.unsqueeze(n), lambda x, n: x.squeeze(n), lambda x, n: x.flatten(n, 2), lambda x, n: x.flip(n),
    lambda x, n: x.reshape(2, -1, n), lambda x, n: x.reshape(n), lambda x, n: x.view(2, -1, n),
    lambda x, n: x.unflatten(2, (2, n)), lambda x, n: x.unflatten(2, n), lambda x, n: x.unflatten(n, (2, 2)),
    lambda x, n: x.expand(2, -1, n), lambda x, n: x.repeat(1, 1, n), lambda x, n: torch.tile(x, (1, 1, n)),
    lambda x, n: x.roll(n, 1), lambda x, n: x.roll(1, n), lambda x, n: x.repeat_interleave(n, 2),
    lambda x, n: x.sort(n), lambda x, n: x.topk(n, 1), lambda x, n: x.select(2, n), lambda x, n: x.narrow(2, n, 1),
    lambda x, n: x.diff(n), lambda x, n: x.chunk(n, 2), lambda x, n: x.new_zeros(n, 2),
]  # fmt: skip


@pytest.mark.parametrize("make", [lambda: tdc.pack([torch.ones(2, 4), torch.ones(1, 4)]), td], ids=["ragged", "td"])
@pytest.mark.parametrize("kind", ["str", "None", "td", "float", "list", "dict", "tensor", "object"])
def test_numbers_of_methods(make: Callable[[], Any], kind: str):
    wrong, x = {**WRONG, "td": td(), "float": 1.5}[kind], make()
    found = []
    for y in (x, x.to_padded()) if isinstance(x, NestedTensor) else (x,):
        for at, call in enumerate(NUMBERED):
            try:
                call(y, wrong)
            except Exception as error:
                if said := problem(f"{at}", error):
                    found.append(f"{type(y).__name__}, call {at}: {said.splitlines()[0]}")
    assert not found, "\n".join(["", *found])


def test_a_tensordict_among_the_arguments_of_a_batch():
    """Its rows run, and want one as what they are called on."""
    with pytest.raises(DtypeError, match="expected a TensorDict as the first argument, got NestedTensor"):
        rows().sum(1, td())


@pytest.mark.parametrize("make", [tdc.optim.adam, tdc.optim.adafactor, tdc.optim.lion, tdc.optim.sgd])
@pytest.mark.parametrize("kind", WRONG)
def test_optimizers(make: Any, kind: str):
    opt, wrong = make(), WRONG[kind]
    calls: list[Any] = [
        lambda: opt.init(wrong),
        lambda: opt.update(wrong, opt.init(PARAMS), PARAMS),
        lambda: opt.update(PARAMS, wrong, PARAMS),
        lambda: opt.update(PARAMS, opt.init(PARAMS), wrong),
        lambda: make(wrong) if kind not in ("int", "tensor") else opt.init(None),
    ]
    for call in calls:
        with pytest.raises(DtypeError) as caught:
            call()
        assert FORM.fullmatch(str(caught.value))


def test_an_error_from_inside_is_a_problem():
    assert problem("pack", AttributeError("'list' object has no attribute 'values'")).startswith("AttributeError")
    assert problem("stack", KeyError("x")).startswith("KeyError")
    assert problem("pack", tdc.ShapeError("tdc.pack: too long")).startswith("not in three parts")
    assert problem("pack", tdc.ShapeError("tdc.pack: expected a, got b\nhint: c")) == ""
