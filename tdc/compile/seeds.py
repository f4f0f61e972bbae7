"""Random numbers that are part of a state: splitmix64, whose state is a number that grows by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GAMMA, BITS = 0x1E3779B97F4A7C15, 0x3FFFFFFFFFFFFFFF  # kept to 62 bits, so that int64 never overflows


def advanced(keys: Tensor) -> Tensor:
    """The next state, one for each member."""
    return (keys + GAMMA) & BITS


def mixed(key: int) -> int:
    """The number that a state stands for; that of a seed is where its states begin."""
    key &= BITS
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (key ^ (key >> 31)) & BITS


@contextmanager
def seeded(keys: Tensor, device: torch.device, rank: int = 0) -> Iterator[None]:
    """Random numbers of these keys and of a rank, on the CPU and on the device; afterwards they are as they were."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append(module.default_generators[module.current_device() if device.index is None else device.index])
    before = [g.get_state() for g in generators]
    seed = rank
    for key in keys.flatten().tolist():
        seed = mixed(seed ^ key)
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)
