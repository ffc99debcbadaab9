"""Clock, memory and condition numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellcond.linalg import Method, polar
from wellcond.tokens import conditioned_tokens

Work = Callable[[], Any]


SETTLE = 0.01
"""Seconds of rest before a measurement: OpenMP's threads go on spinning for some milliseconds after their work, and
would take a core from what is measured next."""


def seconds(works: dict[str, Work], rounds: int, at_least: float = 0.0) -> dict[str, float]:
    """The shortest time of each, measured in turns (A B A B), so that a busy minute of the machine hits all.

    The first round warms up, and being slower does not count. Short works take more than ``rounds`` turns, until
    ``at_least`` so many seconds have passed.
    """
    best = dict.fromkeys(works, float("inf"))
    begun = time.perf_counter()
    while rounds > 0 or time.perf_counter() - begun < at_least:
        rounds -= 1
        for name, work in works.items():
            time.sleep(SETTLE)
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def floor(x: Tensor) -> Tensor:
    """One Gram product and one application in the input's precision: what no method of this kind can beat."""
    if x.shape[-2] < x.shape[-1]:
        return (x @ x.mT) @ x
    product: Tensor = x @ (x.mT @ x)
    return product


def kappa_of_sum(x: Tensor, factor: Tensor, sigma_max: Tensor, rank: int) -> float:
    """κ⁺(X+C) in float64 with the true rank, the worst of the batch."""
    y = x.double() + sigma_max.double()[..., None, None] * factor.double()
    sigma = torch.linalg.svdvals(y)[..., :rank]
    return float((sigma[..., 0] / sigma[..., -1]).max())


def kappa_reached(x: Tensor, method: Method, rank: int) -> float:
    """κ⁺(X+C) by a method of this library."""
    factor, sigma_max, _ = polar(x, method=method)
    return kappa_of_sum(x, factor, sigma_max, rank)


def saved_ratio(x: Tensor, method: Method, gradient: Any) -> float:
    """Bytes that X + C keeps for backward over the bytes of X."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    leaf = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        conditioned_tokens(leaf, method=method, gradient=gradient)
    return sum(sizes.values()) / (x.numel() * x.element_size())


def peak_ratio(x: Tensor, method: Method) -> float:
    """Most bytes that X + C holds at one time beyond X, over the bytes of X."""

    def work() -> None:
        with torch.no_grad():
            conditioned_tokens(x, method=method)

    return peak_bytes(work, x.device.type) / (x.numel() * x.element_size())


def peak_bytes(work: Work, device: str) -> int:
    """Most bytes held at one time beyond those held before.

    On a CPU with one thread, because the allocator's record is kept per thread: each further thread adds
    its own working space, that of one matrix.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            work()
    finally:
        torch.set_num_threads(threads)
    recorded = profile.profiler.kineto_results.events()
    changes = [event for event in recorded if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    if not changes:
        raise RuntimeError("the profiler recorded no allocation; this build of torch cannot measure memory")
    return peak
