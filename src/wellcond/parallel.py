"""Samples side by side on the cores of a CPU, one thread each."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Done = TypeVar("Done")

SMALL_SAMPLE = 1 << 15
"""Samples with fewer entries than this are small."""
SMALL_SAMPLES = 1 << 18
"""Small ones are worked on together up to this number of entries."""
SMALL_MATRICES = 1 << 18
"""Of larger ones as many as asked for, if every thread has its share and d×d of them have no more entries than this."""
WORTH_THREADS = 3 * 10**7
"""Arithmetic of a batch, about 4 ms, from which dividing it among threads, about 1 ms, pays."""


def large_sample(x: Tensor) -> bool:
    """Whether X ``(b, N, d)`` has samples on a CPU that are worth a call of their own."""
    return x.device.type == "cpu" and x.shape[-2] * x.shape[-1] >= SMALL_SAMPLE


def parts_of(x: Tensor, flops: int, together: int = 1) -> list[slice]:
    """Samples done together: small ones, and larger ones up to ``together``, as many parts for every thread. On
    accelerators, which want everything at once, the whole batch. Work on them must not let one depend on its
    neighbours. ``flops`` is the arithmetic of the batch."""
    if x.device.type != "cpu":
        return [slice(0, len(x))]
    n, d = x.shape[-2:]
    if large_sample(x):
        step = max(1, min(together, SMALL_MATRICES // max(1, d * d)))
    else:
        step = SMALL_SAMPLES // max(1, n * d)
    threads = max(2, torch.get_num_threads()) if flops >= WORTH_THREADS else 1  # half at most, for the memory
    share = -(-len(x) // threads)
    count = min(len(x), threads * -(-share // step))
    return [slice(i * len(x) // count, (i + 1) * len(x) // count) for i in range(count)]


def for_each(do: Callable[[slice], Done], parts: list[slice], device: torch.device, flops: int) -> list[Done]:
    """`do` on every part; on a CPU with several threads side by side, one thread each.

    LAPACK on one small matrix does not profit from threads, a batch does; and below `WORTH_THREADS` one thread
    does it all, because threads that wait for each other cost more than the work.
    """
    if device.type != "cpu":
        return [do(part) for part in parts]
    if flops < WORTH_THREADS:
        return side_by_side(do, parts, 1)
    threads = torch.get_num_threads()
    workers = min(threads, len(parts))
    if threads == 1 or workers == 1 or workers < threads // 2:
        with blas_threads(threads):
            return [do(part) for part in parts]
    return side_by_side(do, parts, workers)


def side_by_side(do: Callable[[slice], Done], parts: list[slice], workers: int) -> list[Done]:
    """`do` on every part by ``workers`` threads of one thread each, the calling one among them.

    They live for one call: a pool that outlived it would hang in a forked data loader. Each starts with torch's own
    number of threads and then turns to one for itself; the last line gives later threads of the process their default
    back.
    """
    threads = torch.get_num_threads()
    left = collections.deque(enumerate(parts))
    done: dict[int, Done] = {}
    failed: dict[int, BaseException] = {}

    def work() -> None:
        torch.get_num_threads()  # the first call in a thread sets the process's default; only then may it change
        torch.set_num_threads(1)
        while True:
            try:
                i, part = left.popleft()
            except IndexError:
                return
            try:
                done[i] = do(part)
            except BaseException as error:
                failed[i] = error
                left.clear()

    try:
        with blas_threads(1), ThreadPoolExecutor(workers) as pool:
            for _ in range(workers - 1):
                pool.submit(work)
            work()
    finally:
        torch.set_num_threads(threads)
    if failed:
        raise failed[min(failed)]
    return [done[i] for i in range(len(parts))]


class BlasThreads:
    """How many threads numpy's OpenBLAS takes for one product.

    That number belongs to the process, and callers may overlap in several threads: the first one notes what it
    finds, the last one puts it back.
    """

    def __init__(self, controller: Any) -> None:
        self._controller, self._lock = controller, threading.Lock()
        self._callers = 0
        self._found: Any = None

    @contextlib.contextmanager
    def limited(self, count: int) -> Iterator[None]:
        with self._lock:
            limiter = self._controller.limit(limits=count)
            self._found = limiter if self._callers == 0 else self._found
            self._callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if self._callers == 0:
                    self._found.restore_original_limits()


@functools.cache
def numpy_and_its_blas() -> tuple[Any, BlasThreads] | None:
    """numpy and its OpenBLAS's threads, where numpy and threadpoolctl are installed (extra ``fast``)."""
    try:
        import numpy
        import threadpoolctl
    except ImportError:
        return None
    return numpy, BlasThreads(threadpoolctl.ThreadpoolController().select(internal_api="openblas"))


def blas_threads(count: int) -> contextlib.AbstractContextManager[None]:
    """numpy's products take ``count`` threads inside."""
    found = numpy_and_its_blas()
    return contextlib.nullcontext() if found is None else found[1].limited(count)
