"""Samples made in parallel and kept in parts, so that an interrupted generation goes on where it stopped.

Every sample has a seed of its own. So the files are the same whatever the number of workers, and however often the
generation was interrupted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PART_SIZE = 200
"""Samples in a part: at most the work of some ten seconds is lost."""

WritePart = Callable[[range, Path], None]
Report = Callable[[int], None]


def write_parts(
    write: WritePart, samples: int, folder: Path, settings: dict[str, Any], *, workers: int = 1
) -> list[Path]:
    """Files with samples 0 to ``samples`` − 1 in order, ``PART_SIZE`` in each; those that are there already are kept.

    Args:
        write: writes the samples of a range to a file; it is pickled if there are several workers.
        samples: how many.
        folder: of the parts; it is made.
        settings: what the samples depend on; kept beside the parts.
        workers: processes.

    Raises:
        ValueError: the folder holds parts that were made with other settings.
    """
    if workers < 1 or samples < 1:
        raise ValueError(f"workers and samples count from 1, got workers={workers}, samples={samples}")
    folder.mkdir(parents=True, exist_ok=True)
    agree(folder / "settings.json", settings)
    ranges = [range(start, min(start + PART_SIZE, samples)) for start in range(0, samples, PART_SIZE)]
    paths = [folder / f"{part.start:07d}-{part.stop:07d}" for part in ranges]
    missing = [(part, path) for part, path in zip(ranges, paths, strict=True) if not path.exists()]
    with told(samples, done=samples - sum(len(part) for part, _ in missing)) as report:
        for made in _made(write, missing, workers):
            report(made)
    return paths


def agree(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings to a new file; ValueError if the file is there and holds others."""
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    if not path.exists():
        write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    elif (found := path.read_text(encoding="utf-8")) != text:
        raise ValueError(
            f"{path} says that this folder was made with other settings: {' '.join(found.split())}, not "
            f"{' '.join(text.split())}. Choose another folder, or remove this one"
        )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written under another name and renamed, so that it is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.writing")
    write(part)
    os.replace(part, path)


def _made(write: WritePart, missing: list[tuple[range, Path]], workers: int) -> Iterator[int]:
    """Write each part; how many samples it had."""
    if workers == 1 or len(missing) < 2:
        for part, path in missing:
            yield _written(write, part, path)
        return
    # A forked process could inherit a lock of a thread that it does not have.
    context = multiprocessing.get_context("spawn")
    processes = min(workers, len(missing))
    with concurrent.futures.ProcessPoolExecutor(processes, context, _end_with_parent) as pool:
        with _born_deaf_to_interrupts():
            futures = [pool.submit(_written, write, part, path) for part, path in missing]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _born_deaf_to_interrupts() -> Iterator[None]:
    """Processes that start inside ignore Ctrl-C: they end the part they are at, and their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _written(write: WritePart, part: range, path: Path) -> int:
    write_whole(path, lambda unfinished: write(part, unfinished))
    return len(part)


@contextlib.contextmanager
def told(samples: int, done: int = 0) -> Iterator[Report]:
    """What to call with the number of samples just made: a bar on a terminal, a plain line per tenth elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("samples", total=samples, completed=done)
            yield lambda made: bar.advance(task, made)
        return
    tenths = 10 * done // samples

    def report(made: int) -> None:
        nonlocal done, tenths
        done += made
        if 10 * done // samples > tenths:
            tenths = 10 * done // samples
            print(f"{done} of {samples} samples", file=sys.stderr, flush=True)

    yield report
