"""Figures of one warm call on a device beside its time: what the host does, and what the device does.

    host us      until the call returns, without a wait for the device
    device us    kernels and copies, summed
    launches     of kernels and of CUDA graphs, by the host
    kernels      and copies, on the device
    waits        of the host for the device within the call
    MB           most memory beyond what was there before; None of CUDA graphs, which keep theirs

On the CPU there is no device: its four figures are 0.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tdc.compile import peak_bytes

METERS = ("host us", "device us", "launches", "kernels", "waits", "MB")
Run = Callable[[], Any]
Profile = torch.profiler.ProfilerActivity


def figures(call: Run, device: str, graph: bool) -> list[int | None]:
    """One figure for each of `METERS`."""
    memory = None if graph else round(peak_bytes(call) / 1e6)
    if device == "cpu":
        return [host_time(call, device), 0, 0, 0, 0, memory]
    launches, kernels, busy = profiled(call)
    return [host_time(call, device), busy, launches, kernels, waits(call), memory]


def settle(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_time(call: Run, device: str) -> int:
    """Microseconds until a call returns, the median of five."""
    found = []
    for _ in range(5):
        settle(device)
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    settle(device)
    return round(statistics.median(found) * 1e6)


def profiled(call: Run) -> tuple[int, int, int]:
    """Launches by the host, kernels and copies on the device, and the microseconds that these take."""
    with torch.profiler.profile(activities=[Profile.CUDA, Profile.CPU], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events: list[Any] = list(profiler.events() or ())
    there = [event for event in events if "CUDA" in str(event.device_type)]
    launches = [event for event in events if event.name.startswith("cu") and "Launch" in event.name]
    return len(launches), len(there), round(sum(event.device_time_total for event in there))


def waits(call: Run) -> int:
    """How often the host waits for the device in a call."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)
