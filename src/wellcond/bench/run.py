"""The run: measure everything, judge the goals, print, write JSON and plots."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any, get_args

import torch

from wellcond.bench import models
from wellcond.bench.goals import SMALL_SIDE, judge
from wellcond.bench.measures import floor, kappa_reached, peak_ratio, saved_ratio, seconds
from wellcond.bench.peers import compare
from wellcond.bench.shapes import KINDS, SHAPES, Kind, Shape, matrices, rank_of
from wellcond.linalg import Method, choose_method, polar

METHODS: tuple[Method, ...] = get_args(Method)
ALIKE = ("DeiT-B", "DaViT-B")
"""Left out when quick: two tokens more than ViT-B, and the shape of Swin-B."""

NEWTON_ON_CPU = 5e9
"""Entries times small side above which `newton` is left to accelerators: minutes per matrix on a CPU."""


def bench(quick: bool = False, explain: bool = False, out: Path | None = None) -> int:
    """Measure the polar engine against its goals.

    Args:
        quick: a quarter of every batch, fewer rounds, large shapes at two κ only, of shapes that are alike one:
            below a minute on two quiet cores. Goal 1's share of a training step is then measured on three models,
            else on all.
        explain: print only what ``method="auto"`` chooses for every shape, and why.
        out: folder for ``bench.json``, ``scaling.svg`` and ``ratios.svg``; nothing is written without it.

    Returns:
        0, or 1 when goal 1 (speed on a CPU), 3 (guarantee) or 4 (memory) is missed.
    """
    from wellcond.bench import show

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if explain:
        show.choices([(shape.label, str(t), *choose_method(torch.empty(1, 2, 2, dtype=t, device=device)))
                      for shape in SHAPES for t in (torch.float32, torch.float64)])  # fmt: skip
        return 0
    record = measure(quick, device)
    record["goals"] = judge(record)
    show.table(record)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(record, indent=1, allow_nan=True) + "\n")
        show.plots(record, out)
    return int(any(goal["met"] is False for goal in record["goals"] if goal["number"] in (1, 3, 4)))


def measure(quick: bool, device: str) -> dict[str, Any]:
    """All numbers of a run, as JSON values."""
    start = time.perf_counter()
    torch.manual_seed(0)
    rounds = 2 if quick else 6
    shapes = [shape.quick() for shape in SHAPES if shape.name not in ALIKE] if quick else list(SHAPES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [row for shape in shapes for row in speed_and_guarantee(shape, rounds, quick, device)]
        record: dict[str, Any] = {
            "machine": machine(device),
            "quick": quick,
            "rows": rows,
            "memory": memory(quick, device),
            "scaling": scaling(quick, device),
            "peers": peers(quick, device),
            "steps": shares(rows, quick, device),
            "newton": newton_on_accelerator(device),
        }
    record["fallbacks"] = sorted(
        {str(w.message) for w in caught if "done again by method='svd'" in str(w.message)}
    )
    record["seconds"] = time.perf_counter() - start
    return record


def machine(device: str) -> dict[str, Any]:
    cuda = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "accelerator": cuda,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def speed_and_guarantee(shape: Shape, rounds: int, quick: bool, device: str) -> list[dict[str, Any]]:
    """Goals 1 and 3 for one shape: a row for every κ."""
    print(f"measuring {shape.label}", file=sys.stderr, flush=True)
    rows = []
    kinds: tuple[Kind, ...] = ("1e2", "1e6") if quick and min(shape.n, shape.d) > SMALL_SIDE else KINDS
    for kind, x in matrices(shape, kinds, device).items():
        rank = rank_of(shape, kind)
        times = seconds(
            {
                "auto": lambda x=x: polar(x),  # type: ignore[misc]
                "svd": lambda x=x: torch.linalg.svd(x, full_matrices=False),  # type: ignore[misc]
                "floor": lambda x=x: floor(x),  # type: ignore[misc]
            },
            rounds,
            at_least=0.3 if quick else 3.0,
        )
        few = x[:1] if quick else x[:2]
        heavy = few.numel() * min(shape.n, shape.d) > NEWTON_ON_CPU / (10 if quick else 1)
        methods = [m for m in METHODS if not (m == "newton" and heavy and device == "cpu")]
        if quick:  # the reference, and what auto has chosen, are measured in the full run
            methods = [m for m in methods if m not in ("svd", choose_method(x)[0])]
        rows.append(
            {
                "shape": shape.name,
                "label": shape.label,
                "size": [shape.batch, shape.n, shape.d],
                "kappa": kind,
                "method": choose_method(x)[0],
                **{name: times[name] for name in times},
                "over_floor": times["auto"] / times["floor"],
                "speedup": times["svd"] / times["auto"],
                "reached": {m: kappa_reached(few, m, rank) for m in methods},
            }
        )
    return rows


def shares(rows: list[dict[str, Any]], quick: bool, device: str) -> list[dict[str, Any]]:
    """The correction's part of a forward and backward, per sample; of the whole batch for a table."""
    found: list[dict[str, Any]] = []
    wanted = ("ViT-B", "Swin-B", "LRA") if quick else tuple(s.name for s in SHAPES)
    if device != "cpu":
        return found
    for shape in (s for s in SHAPES if s.model and s.name in wanted):
        mine = [row for row in rows if row["shape"] == shape.name]
        batch = 1 if quick else 4
        step = models.seconds_per_sample(shape.model or "", batch, 1 if quick else 3)
        worst = max(row["auto"] for row in mine)
        samples = shape.samples or mine[0]["size"][0]
        scale = shape.n / mine[0]["size"][1]  # a quick table has a 32nd of the rows
        share = worst * scale / (step * samples)
        found.append(
            {"shape": shape.name, "model": shape.model, "step_per_sample": step, "measured_batch": batch,
             "samples": samples, "share": share, "allowed": shape.share}
        )  # fmt: skip
    return found


def memory(quick: bool, device: str) -> list[dict[str, Any]]:
    """Goal 4, for every shape (at most 8 of the batch, 2 when quick) and method; large small sides in full runs."""
    found = []
    for shape in SHAPES:
        if quick and min(shape.n, shape.d) > 256:
            continue
        x = torch.randn(min(shape.batch, 2 if quick else 8), shape.n, shape.d, device=device)
        for method in METHODS:
            heavy = x.numel() * min(x.shape[-2:]) > NEWTON_ON_CPU / (10 if quick else 1)
            if method == "auto" or (method == "newton" and heavy and device == "cpu"):
                continue
            if quick and method == "svd":
                continue
            found.append(
                {
                    "shape": shape.name,
                    "method": method,
                    "constant": saved_ratio(x, method, "constant"),
                    "exact": saved_ratio(x, method, "exact"),
                    "peak": peak_ratio(x, method),
                }
            )
    return found


def scaling(quick: bool, device: str) -> dict[str, Any]:
    """Goal 5: time over the batch (196×256) and over the longer side (d = 64)."""
    batches = (4, 8, 16) if quick else (8, 16, 32, 64, 128)
    lengths = (1024, 2048, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    found = {}
    for name, sizes in (
        ("batch", {b: (b, 196, 256) for b in batches}),
        ("longer side", {n: (8, n, 64) for n in lengths}),
    ):
        tokens = {size: torch.randn(*shape, device=device) for size, shape in sizes.items()}
        times = seconds({str(size): (lambda x=x: polar(x)) for size, x in tokens.items()}, 3)  # type: ignore[misc]
        logs = [(math.log(size), math.log(times[str(size)])) for size in tokens]
        centre = [sum(column) / len(logs) for column in zip(*logs, strict=True)]
        slope = sum((a - centre[0]) * (b - centre[1]) for a, b in logs) / sum(
            (a - centre[0]) ** 2 for a, _ in logs
        )
        found[name] = {"seconds": times, "exponent": slope}
    return found


def peers(quick: bool, device: str) -> list[dict[str, Any]]:
    """Goal 6 on ViT-B and Swin-B tokens at κ = 1e4."""
    found = []
    for shape in (
        Shape("ViT-B", 2 if quick else 16, 196, 768),
        Shape("Swin-B", 2 if quick else 8, 3136, 128),
    ):
        x = matrices(shape, ("1e4",), device)["1e4"]
        rows = compare(x, rank_of(shape, "1e4"), 1 if quick else 3)
        found += [{"label": shape.label, "kappa": "1e4", **row} for row in rows]
    return found


def newton_on_accelerator(device: str) -> dict[str, Any]:
    """Goal 2: measured where there is an accelerator, else counted against a training step and said so."""
    batch, n, d = 128, 196, 768
    flops, step = models.flops_of_newton(batch, n, d), models.flops_of_step(batch)
    found: dict[str, Any] = {"measured": device == "cuda", "batch": batch, "flops": flops, "step_flops": step}
    if device == "cuda":
        x = matrices(Shape("ViT-B", batch, n, d), ("1e4",), device)["1e4"]
        found |= seconds(
            {
                "newton": lambda: polar(x, method="newton"),
                "svd": lambda: torch.linalg.svd(x, full_matrices=False),
            },
            3,
        )
    return found
