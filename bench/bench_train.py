"""What does a whole training run of an encoder cost, as one step, against torch's own loops?

    train_step     `train_step(net, loss, adamw(...), donate=True)` on ragged batches
    module         `torch.compile` of the same module on the same batches, backward, and fused `torch.optim.AdamW`
    padded         what a trainer does in plain torch: `pad_sequence`, a padding mask, the compiled module, backward,
                   fused AdamW, zero_grad; lengths are marked dynamic, so that it compiles once
    loop           `train_step` of the module with its layers as one loop, `tdc.compile.scan_blocks`
    regions        the compiled module with its layers as `torch.compiler.nested_compile_region`, compiled once for all
    danling        the module on DanLing's NestedTensor, eagerly, since its attention does not compile, and fused AdamW

Encoders of 6 and of 24 layers, ten batches of different lengths and sizes. Measured: CPU time to the end of the first
step, compilers included; step time and peak memory when warm; compiles over the ten batches; guards that each call
runs. Limits, for the loop: 24 layers start in 1.5 times what 6 take, and in half of what the compiled module takes.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from bench._timing import Report, arguments, count_guards, exact, interleaved, own, peer, ratio
from bench.cold_start import cpu
from tdc import TensorDict
from tdc.compile import backend, dynamic, peak_bytes, scan_blocks, train_step
from tdc.optim import adamw

WIDTH, HEADS, CLASSES, LR = 32, 2, 8, 1e-3
Run = Callable[[TensorDict], Tensor]


class Encoder(nn.Module):
    """Rows of tokens to one class each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Any) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))

    def padded(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Run the same step on a rectangle."""
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


def batches(device: str) -> list[TensorDict]:
    """Ten of different sizes, with lengths from 4 to 60."""
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(10):
        lengths = torch.randint(4, 61, (12 + i,), generator=generator).tolist()
        rows = [torch.randint(64, (n,), generator=generator) for n in lengths]
        batch = TensorDict({"tokens": tdc.pack(rows), "label": torch.arange(len(rows)) % CLASSES}, [len(rows)])
        found.append(dynamic(batch.to(device)))
    return found


def loss(net: nn.Module, batch: TensorDict) -> Tensor:
    return F.cross_entropy(net(batch["tokens"]), batch["label"])


class Ours:
    """One function; the state goes round."""

    def __init__(self, net: nn.Module) -> None:
        self.step = train_step(net, loss, adamw(LR), donate=True)
        self.state = self.step.init()

    def __call__(self, batch: TensorDict) -> Tensor:
        self.state, metrics = self.step(self.state, batch)
        return metrics["loss"]

    def compiled(self) -> Any:
        """The function that Dynamo has guards for."""
        run: Any = self.step._run
        return run._compiled._torchdynamo_orig_callable


class Module:
    """A compiled function of the module, backward, and an optimiser that changes parameters in place."""

    def __init__(self, net: nn.Module, padded: bool = False, danling: ModuleType | None = None) -> None:
        self.net, self.padded, self.danling = copy.deepcopy(net), padded, danling
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=LR, fused=True)
        module: Any = self.net
        if padded:
            self.fn = own(lambda x, pad, y: F.cross_entropy(module.padded(x, pad), y))
        else:
            self.fn = own(lambda batch: loss(module, batch))
        self.forward = self.fn if danling else torch.compile(self.fn, backend=backend, fullgraph=True)

    def __call__(self, batch: TensorDict) -> Tensor:
        value = self.loss(batch)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def loss(self, batch: TensorDict) -> Tensor:
        if self.danling:
            rows = self.danling.NestedTensor(*batch["tokens"].unbind())
            return F.cross_entropy(self.net(rows), batch["label"])
        return self.forward(*rectangle(batch)) if self.padded else self.forward(batch)

    def compiled(self) -> Any:
        """The function that Dynamo has guards for."""
        return self.fn


def rectangle(batch: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
    """A batch as a collate function pads it."""
    rows = batch["tokens"]
    x = nn.utils.rnn.pad_sequence(list(rows.unbind()), batch_first=True)
    padding = torch.arange(x.shape[1])[None] >= rows.lengths[:, None]
    found = [dynamic(x, dims=(0, 1)), dynamic(padding, dims=(0, 1)), dynamic(batch["label"])]
    return found[0], found[1], found[2]


@torch.compiler.nested_compile_region
def once(layer: Any, values: Tensor, offsets: Tensor) -> Tensor:
    """A layer on packed rows; compiled once for all layers alike. A region takes and gives tensors only."""
    return layer(tdc.NestedTensor(values, offsets)).values


class Alike(nn.Module):
    """A layer that is compiled once for all that are like it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        region: Any = once  # typed as a decorator
        return x.with_values(region(self.layer, x.values, x.offsets))


def shared(net: Encoder) -> nn.Module:
    """An encoder whose layers are regions that compile once."""
    other: Any = copy.deepcopy(net)
    other.encoder = nn.Sequential(*[Alike(layer) for layer in other.encoder.layers])
    return other


def first_step(report: Report, run: Any, batch: TensorDict) -> tuple[float, float]:
    """CPU time of a first step, compilers included, and its loss."""
    torch._dynamo.reset()
    gc.collect()
    begin = sum(cpu())
    value = run(batch).item()
    return sum(cpu()) - begin, value


def guards_of(run: Any) -> int:
    """Guards that each call runs."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(run.compiled())
    return sum(count_guards(entry.guard_manager.root) for entry in entries)


def measure(report: Report, layers: int, danling: ModuleType | None) -> dict[str, float]:
    """All candidates on one encoder; CPU seconds to the end of the first step of each."""
    given, net = batches(report.device), Encoder(layers).to(report.device)
    makers: dict[str, Callable[[], Any]] = {
        "train_step": lambda: Ours(net), "module": lambda: Module(net), "padded": lambda: Module(net, padded=True),
        "regions": lambda: Module(shared(net)), "loop": lambda: Ours(scan_blocks(net, nn.TransformerEncoderLayer)),
    }  # fmt: skip
    if danling:
        makers["danling"] = lambda: Module(net, danling=danling)
    runs: dict[str, Any] = {}
    firsts: dict[str, float] = {}
    losses: dict[str, float] = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for label, make in makers.items():
            run = make()
            begin = time.perf_counter()
            try:
                firsts[label], losses[label] = first_step(report, run, given[0])
            except Exception as error:  # a peer that does not compile is a finding
                report.note(f"{layers} layers, {label}: does not compile, {type(error).__name__}: {str(error)[:160]}")
                continue
            runs[label] = run
            wall = time.perf_counter() - begin
            figures = f"{firsts[label]:.1f} s CPU, {wall:.0f} s wall, {guards_of(run)} guards"
            report.note(f"{layers} layers, {label}: first step {figures}")
            for batch in given[1:]:
                run(batch)
    apart = max(losses.values()) - min(losses.values())
    report.note(f"{layers} layers: first losses within {apart:.1e} of each other")
    counts = runs["train_step"].step.counts
    report.limit(f"{layers} layers, 10 batches: compiles", exact(counts.compiles), 1, unit="")
    peaks = {label: peak_bytes(run, given[0]) for label, run in runs.items()}
    calls = {label: (lambda run=run: run(given[0])) for label, run in runs.items()}
    times = interleaved(calls, rounds=7 if report.quick else 21, burst=0.03, device=report.device)
    sizes = ", ".join(f"{label} {size / 1e6:.3g}" for label, size in peaks.items())
    seconds = ", ".join(f"{label} {s:.1f}" for label, s in firsts.items())
    report.row(f"{layers} layers, step", times, "module", first_step_s=seconds, peak_MB=sizes)
    report.limit(f"{layers} layers: time, train_step to module", ratio(times["train_step"], times["module"]), 1.0)
    report.limit(f"{layers} layers: time, train_step to padded", ratio(times["train_step"], times["padded"]), 1.0)
    report.limit(f"{layers} layers: time, loop to module", ratio(times["loop"], times["module"]), 1.0)
    report.limit(f"{layers} layers: memory, train_step to module", exact(peaks["train_step"] / peaks["module"]), 1.05)
    return firsts


def main() -> None:
    args = arguments("bench_train")
    question = "What does training an encoder on ragged batches cost, as one step, against torch's own loops?"
    report = Report("bench_train", question, args.device, args.quick)
    torch.manual_seed(0)
    sizes = (1, 3) if report.quick else (6, 24)
    danling = peer("danling", report)
    if danling:
        report.version(danling)
    few, many = [measure(report, layers, danling) for layers in sizes]
    for label in ("train_step", "module", "regions"):
        if label in few and label in many:
            report.note(f"first step, {label}: {sizes[1]} layers take {many[label] / few[label]:.2f} times {sizes[0]}")
    report.limit(f"first step, loop: {sizes[1]} layers to {sizes[0]}", exact(many["loop"] / few["loop"]), 1.5)
    report.limit(f"first step, {sizes[1]} layers: loop to module", exact(many["loop"] / many["module"]), 0.5)
    report.write()


if __name__ == "__main__":
    main()
