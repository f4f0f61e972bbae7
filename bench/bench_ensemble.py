"""What do modules as functions cost, and eight models trained as one?

    from_module        over `dict(module.named_parameters())`, which holds parameters only; `from_module` also looks for
                       buffers, detaches and nests                                                     limit 1.3
    functional_call    what it adds to the time of `module(x)`, over what torch.func's adds with a flat dict of the same
                       tensors, eager                                                                  limit 1.0
    ensemble           one compiled training step (loss, gradients, AdamW) of 8 members at once, over the step of one
                       member on the same batch, `small mlp`                                 limit 2.0, on a GPU 1.5

Modules: `small mlp`, 8-32-1 on 64 rows; `mlp`, 16-64-64-4 on 32 rows; `batch norm`, with statistics, which we copy and
torch writes into; `encoder`, nn.TransformerEncoder of 4 layers. The larger the member, the less eight at once gain:
the step of `mlp` has a row without a limit, as have compiled calls and the loop over 8 members. Graphs and compiles of
the steps are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tdc
from bench._timing import Report, Spread, arguments, interleaved, own, ratio, spread
from tdc import TensorDict, from_module, functional_call, stack_modules
from tdc.compile import counted
from tdc.optim import adamw

MEMBERS = 8
LIMIT = {"cpu": 2.0, "cuda": 1.5}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4), nn.BatchNorm1d(4))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (2, 16)),
    "batch norm": (batch_norm, (2, 16)),
    "encoder": (encoder, (2, 3, 16)),
}
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {  # and rows, features, targets
    "small mlp": (small_mlp, (64, 8, 1)),
    "mlp": (mlp, (32, 16, 4)),
}


def over(times: dict[str, list[float]]) -> Spread:
    """Time that tdc adds to the module, over the time that torch adds, round by round."""
    rounds = zip(times["tdc"], times["torch"], times["module"], strict=True)
    return spread([(ours - bare) / (theirs - bare) for ours, theirs, bare in rounds])


def by_torch(module: nn.Module, tensors: Any, x: torch.Tensor) -> Any:
    return torch.func.functional_call(module, tensors, (x,))


def by_tdc(module: nn.Module, tensors: Any, x: torch.Tensor) -> Any:
    return functional_call(module, tensors, (x,))


def taking(report: Report, rounds: int) -> None:
    """The parameters of a module."""
    for name in ("mlp", "encoder", "batch norm"):
        module = MODULES[name][0]().to(report.device)
        calls = {"dict": lambda m=module: dict(m.named_parameters()), "tdc": lambda m=module: from_module(m)}
        times = interleaved(calls, rounds=rounds, device=report.device)
        counts = f"{len(list(module.parameters()))}, {len(list(module.buffers()))}"
        report.row(f"from_module, {name}", times, "dict", **{"parameters, buffers": counts})
        if name != "batch norm":  # there it takes twice as many tensors as the peer
            report.limit(f"from_module over dict(named_parameters()), {name}", ratio(times["tdc"], times["dict"]), 1.3)


def calling(report: Report, rounds: int) -> None:
    """A module with other parameters, eager with a limit, then compiled."""
    for name, (make, shape) in MODULES.items():
        module, x = make().to(report.device), torch.randn(shape, device=report.device)
        flat = {n: t.detach().clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}
        td = from_module(module).apply(torch.clone)
        calls = {
            "module": lambda m=module, x=x: m(x),
            "torch": lambda m=module, d=flat, x=x: by_torch(m, d, x),
            "tdc": lambda m=module, d=td, x=x: by_tdc(m, d, x),
        }
        with torch.no_grad():
            times = interleaved(calls, rounds=rounds, device=report.device)
            report.row(f"functional_call, {name}", times, "torch")
            report.limit(f"what functional_call adds over torch.func's, {name}", over(times), 1.0)
            torch._dynamo.reset()
            pairs = {"torch": (torch.compile(own(by_torch)), flat), "tdc": (torch.compile(own(by_tdc)), td)}
            compiled = {n: lambda f=f, m=module, d=d, x=x: f(m, d, x) for n, (f, d) in pairs.items()}
            report.row(f"compiled call, {name}", interleaved(compiled, rounds=rounds, device=report.device), "torch")


def training(report: Report, rounds: int, name: str) -> Spread:
    """One step of one member, of all at once, and of one after the other; the second over the first."""
    torch._dynamo.reset()
    make, sizes = STEPS[name]
    nets = [make().to(report.device) for _ in range(MEMBERS)]
    x, y = [torch.randn(sizes[0], n, device=report.device) for n in sizes[1:]]
    opt = adamw(lr=1e-3)

    def step(params: TensorDict, state: TensorDict, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = tdc.value_and_grad(lambda p: F.mse_loss(functional_call(nets[0], p, (x,)), y))(params)
        return *opt.update(grads, state, params), loss

    def stopping(alive: Any, params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        new, after, loss = step(params, state, x, y)
        return torch.where(alive, new, params), torch.where(alive, after, state), loss

    members, one = stack_modules(nets), from_module(nets[0])
    states, state = opt.init(members), opt.init(one)
    alive = torch.ones(MEMBERS, dtype=torch.bool, device=report.device)
    single = counted(step)
    every = counted(tdc.vmap(step, (0, 0, None, None)))
    masked = counted(tdc.vmap(stopping, (0, 0, 0, None, None)))
    each = [(members[k].apply(torch.clone), states[k].apply(torch.clone)) for k in range(MEMBERS)]
    calls = {
        "one member": lambda: single(one, state, x, y),
        f"{MEMBERS} at once": lambda: every(members, states, x, y),
        f"{MEMBERS} with a mask": lambda: masked(alive, members, states, x, y),
        f"{MEMBERS} in a loop": lambda: [single(*pair, x, y) for pair in each],
    }
    times = interleaved(calls, rounds=rounds, burst=0.005, device=report.device)
    found = [f.counts for f in (single, every, masked)]
    graphs, compiles = ", ".join(str(c.graphs) for c in found), ", ".join(str(c.compiles) for c in found)
    report.row(f"training step, {name}", times, "one member", graphs=graphs, compiles=compiles)
    return ratio(times[f"{MEMBERS} at once"], times["one member"])


def main() -> None:
    args = arguments("bench_ensemble")
    question = "What do modules as functions cost, and eight models trained as one?"
    report = Report("bench_ensemble", question, args.device, args.quick)
    rounds = 9 if args.quick else 61
    taking(report, rounds)
    calling(report, rounds)
    for name in STEPS:
        figure = training(report, rounds, name)
        if name == "small mlp":
            what = f"compiled training step of {MEMBERS} members over one, {name}"
            report.limit(what, figure, LIMIT[report.device])
    report.write()


if __name__ == "__main__":
    main()
