"""A run folder made of invented numbers. Test data: nothing in it was ever measured."""

import json
import math
from pathlib import Path

import numpy as np

from wellcond.monitor import append_lines

ARMS = {
    # name: (accuracy, κ of tokens, κ of attention, description, leaks)
    "baseline": (93.3, 87.0, 240.0, "No conditioning.", False),
    "conditioned": (97.2, 1.9, 31.0, "C added after the positions.", False),
    "conditioned-tokens": (84.6, 6.5, 90.0, "C added before the positions.", False),
    "rescaled": (97.0, 1.9, 35.0, "Conditioned, Frobenius norm kept.", False),
    "scaled": (93.6, 87.0, 230.0, "Control: only the norm of the conditioned arm.", False),
    "positions": (97.4, 4.7, 55.0, "Control: only larger positions.", False),
}
STEPS = range(0, 401, 50)


def row(arm, seed, step, site, layer, head, kappa, pinv=None):
    return {
        "step": step, "site": site, "layer": layer, "head": head, "kappa": kappa,
        "kappa_pinv": kappa if pinv is None else pinv, "rank": 16, "sigma_max": 10.0, "sigma_min": 0.1,
        "module": "blocks.0" if layer is None else f"blocks.{layer}.attn", "samples": 8,
        "arm": arm, "seed": seed,
    }  # fmt: skip


def write_run(
    folder: Path,
    *,
    arms=tuple(ARMS),
    seeds=3,
    infinite=(),
    leaking=(),
    rows=True,
    spectra=True,
    layers=2,
    heads=2,
) -> Path:
    """A run folder of ``arms``; κ is infinite in the arms of ``infinite``."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    facts = {arm: ARMS.get(arm, ARMS["conditioned"]) for arm in arms}
    run = {
        "recipe": "synthetic",
        "title": "TEST DATA: a small ViT on invented digits",
        "command": f"wellcond demo --seeds {seeds} --out runs/demo",
        "arms": [
            {
                "name": arm,
                "description": fact[3],
                "leaks": arm in leaking,
                "control": arm in ("scaled", "positions"),
            }
            for arm, fact in facts.items()
        ],
        "seeds": list(range(seeds)),
        "metric": {"name": "accuracy", "higher_is_better": True, "unit": "%"},
        "versions": {"python": "3.11.9", "torch": "2.14.1", "timm": "1.0.31", "wellcond": "0.1.0"},
        "config": {
            "model": {"name": "vit", "depth": layers, "heads": heads, "embed_dim": 64},
            "optimizer": {"name": "adamw", "learning_rate": 0.001, "weight_decay": 0.05},
            "epochs": 20, "batch_size": 64, "image_transforms": ["pad", "crop", "normalise"],
        },
        "hypotheses": [
            "conditioned reaches a higher accuracy than baseline.",
            "positions, which does not condition, reaches what conditioned reaches.",
        ],
        "machine": "invented, 2 cores",
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    accuracy = {arm: fact[0] + 0.5 * rng.standard_normal(seeds) for arm, fact in facts.items()}
    summary, results, lines = {}, [], []
    base = accuracy[arms[0]]
    for arm, (target, tokens, attention, _, _) in facts.items():
        values = accuracy[arm]
        summary[arm] = {
            "n": seeds, **interval(values), "verdict": "", "relative_step_time": 1.0 + 0.08 * (tokens < 80),
            "difference": None if arm == arms[0] else {**interval(values - base), "effect": effect(values - base)},
            "kappa": {
                "tokens": "inf" if arm in infinite else tokens, "first_layer": attention,
                "all_layers": attention * 12,
            },
        }  # fmt: skip
        for seed in range(seeds):
            curve = [
                {
                    "step": step,
                    "loss": 0.08 + 2.2 * math.exp(-step / (90 if tokens < 80 else 140)) + 0.03 * rng.random(),
                    "accuracy": values[seed] - (target - 10) * math.exp(-step / 70),
                }
                for step in STEPS
            ]
            results.append(
                {
                    "arm": arm, "seed": seed, "metrics": {"accuracy": values[seed], "loss": curve[-1]["loss"]},
                    "seconds_per_step": 0.05, "peak_memory_mb": None, "curve": curve,
                }
            )  # fmt: skip
            if not rows:
                continue
            for step in STEPS:
                grow = 1 + step / 300 * rng.uniform(0.8, 1.2)
                value = tokens * (1 if tokens < 2 else grow)
                lines.append(
                    row(arm, seed, step, "tokens", None, None, math.inf if arm in infinite else value, value)
                )
                for layer in range(layers):
                    for head in range(heads):
                        kappa = attention * grow * (1 + 9 * layer) * rng.uniform(0.7, 1.3)
                        lines.append(row(arm, seed, step, "attention.output", layer, head, kappa))
    append_lines(folder / "results.jsonl", results)
    (folder / "summary.json").write_text(json.dumps(summary))
    if rows:
        append_lines(folder / "rows.jsonl", lines)
    if spectra:
        sigma = np.geomspace(60, 60 / 87, 16)
        (folder / "spectra.json").write_text(
            json.dumps(
                {
                    arm: {
                        "before": sigma.tolist(),
                        "after": (sigma + 60).tolist() if fact[1] < 2 else None,
                    }
                    for arm, fact in facts.items()
                }
            )
        )
    return folder


def interval(values):
    """Mean and 95 % interval by Student's t; no interval for one seed."""
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) == 1:
        return {"mean": mean, "low": None, "high": None}
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def effect(values):
    return None if len(values) == 1 else float(np.mean(values) / np.std(values, ddof=1))
