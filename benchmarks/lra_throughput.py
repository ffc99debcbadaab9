"""What conditioning costs the Long Range Arena's model: ``python benchmarks/lra_throughput.py`` on a quiet machine.

The published Nyströmformer at N = 1024, 2048 and 4096 tokens, sequences of N/2 to N real tokens: time of a training
step (forward, backward, AdamW) and of a forward pass, the shortest of several, measured in turns; and the most memory
that a training step holds beyond weights, optimizer and batch. Prints a Markdown table and writes JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellcond.bench.measures import peak_bytes, seconds
from wellcond.bench.run import machine
from wellcond.data.lra.sequences import BYTES
from wellcond.recipes.lra import nystrom_classifier
from wellcond.training.arms import select_arms

ARMS = ("baseline", "conditioned", "static")
LENGTHS = (1024, 2048, 4096)
OUT = Path(__file__).parent.parent / "records" / "2026-12-01-lra" / "throughput.json"


def padded(length: int, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Random bytes, between half of ``length`` and all of it real."""
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(1, BYTES, (batch, length), generator=numbers)
    real = torch.randint(length // 2, length + 1, (batch, 1), generator=numbers)
    mask = (torch.arange(length) < real).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]
) -> None:
    optimizer.zero_grad()
    model(**inputs).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    model.eval()
    model(**inputs)
    model.train()


def measure(length: int, batch: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """One line an arm; all arms have the same weights and samples."""
    inputs = padded(length, batch, device)
    steps, forwards = {}, {}
    for arm in select_arms(ARMS):
        torch.manual_seed(0)
        model = nystrom_classifier(BYTES, length, 2).to(device).train()
        arm.apply_(model, inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        steps[arm.name] = partial(training_step, model, optimizer, inputs)
        forwards[arm.name] = partial(forward, model, inputs)
    step_times, forward_times = seconds(steps, rounds + 1), seconds(forwards, rounds + 1)
    return [
        {
            "tokens": length,
            "arm": arm,
            "batch": batch,
            "step_seconds": step_times[arm],
            "forward_seconds": forward_times[arm],
            "step_peak_bytes": peak_bytes(steps[arm], device),
        }
        for arm in ARMS
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: throughput and memory, each beside its ratio to the baseline's."""
    lines = [
        "| tokens | arm | training, samples/s | | forward, samples/s | | peak memory of a step, MB a sample | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(r for r in rows if r["arm"] == "baseline" and r["tokens"] == row["tokens"])
        memory = f"{row['step_peak_bytes'] / row['batch'] / 1e6:.1f}"
        lines.append(
            f"| {row['tokens']} | {row['arm']} "
            f"| {row['batch'] / row['step_seconds']:.1f} | ×{base['step_seconds'] / row['step_seconds']:.2f} "
            f"| {row['batch'] / row['forward_seconds']:.1f} | ×{base['forward_seconds'] / row['forward_seconds']:.2f} "
            f"| {memory} | ×{row['step_peak_bytes'] / base['step_peak_bytes']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", type=int, default=None, help="default: 8 on a CPU, 32 (the published) on a GPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="two samples, two rounds, nothing written but to --out"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help=f"default: {OUT.name} in records/{OUT.parent.name}"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = options.batch or (2 if options.quick else 32 if device == "cuda" else 8)
    rows = []
    for length in LENGTHS:
        print(f"{length} tokens", file=sys.stderr, flush=True)
        rows += measure(length, batch, 2 if options.quick else options.rounds, device)
    print(table(rows))
    out = options.out or (None if options.quick else OUT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
