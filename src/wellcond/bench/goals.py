"""The goals of the engine, judged from a record: met, missed, or not measured here (None)."""

from __future__ import annotations

import math
from typing import Any

KAPPA = 2.002
GEOMETRIC_MEAN = 3.0
SMALL_SIDE = 256
AT_SMALL_SIDE = 2.0
SAVED = {"constant": 2.0, "exact": 4.0}
PEAK = 3.0
EXPONENT = 1.15


def judge(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per goal: number, what, met, and the number that decided it."""
    return [
        *speed(record),
        accelerator(record),
        guarantee(record),
        memory(record),
        scaling(record),
        {"number": 6, "what": "peers in the same run", "met": bool(record["peers"]),
         "found": f"{len({row['peer'] for row in record['peers']})} of them"},
    ]  # fmt: skip


def goal(number: int, what: str, met: bool | None, found: str) -> dict[str, Any]:
    return {"number": number, "what": what, "met": met, "found": found}


def speed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Goal 1; speed against the SVD is stated for a CPU."""
    if record["machine"]["accelerator"]:
        return [goal(1, "speed on a CPU", None, "this run is on an accelerator")]
    rows = record["rows"]
    mean = math.exp(sum(math.log(row["speedup"]) for row in rows) / len(rows))
    small = min((row for row in rows if min(row["size"][1:]) <= SMALL_SIDE), key=lambda row: row["speedup"])
    slowest = min(rows, key=lambda row: row["speedup"])
    found = [
        goal(
            1,
            f"≥ {GEOMETRIC_MEAN:g}× torch.linalg.svd, geometric mean",
            mean >= GEOMETRIC_MEAN,
            f"{mean:.2f}×",
        ),
        goal(
            1,
            f"≥ {AT_SMALL_SIDE:g}× where min(N, d) ≤ {SMALL_SIDE}",
            small["speedup"] >= AT_SMALL_SIDE,
            worst(small),
        ),
        goal(1, "never slower than the SVD", slowest["speedup"] >= 1.0, worst(slowest)),
    ]
    for step in record["steps"]:
        met = step["share"] <= step["allowed"]
        what = f"≤ {step['allowed']:.0%} of a forward and backward of {step['model']}"
        found.append(goal(1, what, met, f"{step['share']:.2%}"))
    return found


def worst(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f}× at {row['label']}, κ {row['kappa']}"


def accelerator(record: dict[str, Any]) -> dict[str, Any]:
    """Goal 2."""
    newton = record["newton"]
    share = newton["flops"] / newton["step_flops"]
    if not newton["measured"]:
        text = f"not measured on a GPU; {newton['flops'] / 1e9:.0f} GFLOP, {share:.2%} of a ViT-B/16 step's"
        return goal(2, "≥ 20× the SVD on a GPU", None, text)
    ratio = newton["svd"] / newton["newton"]
    return goal(
        2, "≥ 20× the SVD on a GPU", ratio >= 20, f"{ratio:.1f}×; {share:.2%} of a ViT-B/16 step's FLOP"
    )


def guarantee(record: dict[str, Any]) -> dict[str, Any]:
    """Goal 3."""
    reached = [(kappa, method, row) for row in record["rows"] for method, kappa in row["reached"].items()]
    kappa, method, row = max(reached, key=lambda entry: entry[0])
    text = f"{kappa:.5f} by {method} at {row['label']}, κ {row['kappa']} ({len(reached)} cases)"
    return goal(3, f"κ⁺(X+C) ≤ {KAPPA} everywhere", all(k <= KAPPA for k, _, _ in reached), text)


def memory(record: dict[str, Any]) -> dict[str, Any]:
    """Goal 4."""
    rows = record["memory"]
    most = {key: max(rows, key=lambda row: row[key]) for key in ("constant", "exact", "peak")}
    met = all(most[key][key] <= limit for key, limit in (*SAVED.items(), ("peak", PEAK)))
    text = ", ".join(f"{key} {row[key]:.2f}×" for key, row in most.items())
    text += f" by {most['peak']['method']} at {most['peak']['shape']}"
    return goal(4, "kept ≤ 2× (constant), ≤ 4× (exact), peak ≤ 3× the input", met, text)


def scaling(record: dict[str, Any]) -> dict[str, Any]:
    """Goal 5."""
    exponents = {name: entry["exponent"] for name, entry in record["scaling"].items()}
    text = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    return goal(
        5, "time linear in batch and longer side (exponent)", max(exponents.values()) <= EXPONENT, text
    )
