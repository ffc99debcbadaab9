"""The record as tables on the terminal and as two plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARK = {True: "met", False: "MISSED", None: "not measured"}


def choices(rows: list[tuple[str, ...]]) -> None:
    """What ``auto`` chooses and why."""
    _print("method='auto'", ("tokens", "dtype", "method", "why"), rows)


def table(record: dict[str, Any]) -> None:
    """Everything of a run."""
    machine = record["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}"
          f"{', ' + machine['accelerator'] if machine['accelerator'] else ''}; {record['seconds']:.0f} s"
          f"{'; quick: a quarter of every batch' if record['quick'] else ''}")  # fmt: skip
    _print(
        "milliseconds per batch, float32",
        ("tokens", "κ", "method", "floor", "auto", "SVD", "auto/floor", "SVD/auto", "largest κ⁺(X+C)"),
        [
            (
                row["label"],
                row["kappa"],
                row["method"],
                *(f"{row[key] * 1e3:.1f}" for key in ("floor", "auto", "svd")),
                f"{row['over_floor']:.1f}",
                f"{row['speedup']:.2f}",
                f"{max(row['reached'].values()):.5f}",
            )
            for row in record["rows"]
        ],
    )
    _print(
        "memory over the input",
        ("tokens", "method", "kept, constant", "kept, exact", "peak"),
        [
            (row["shape"], row["method"], *(f"{row[key]:.2f}" for key in ("constant", "exact", "peak")))
            for row in record["memory"]
        ],
    )
    _print(
        "peers, κ = 1e4",
        ("tokens", "peer", "ms", "κ⁺(X+C)", "error of F", "gradient at equal σ"),
        [
            (row["label"], row["peer"], f"{row['seconds'] * 1e3:.1f}", f"{row['kappa']:.4f}", f"{row['error']:.1e}",
             row["gradient"])
            for row in record["peers"]
        ],
    )  # fmt: skip
    _print(
        "goals",
        ("goal", "what", "", "found"),
        [(str(goal["number"]), goal["what"], MARK[goal["met"]], goal["found"]) for goal in record["goals"]],
    )
    for fallback in record["fallbacks"]:
        print(f"fallback: {fallback}")


def _print(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=None if console.is_terminal else 150).print(table)


def plots(record: dict[str, Any], out: Path) -> None:
    """``scaling.svg``: time over size; ``ratios.svg``: every shape against the floor and the SVD."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, (name, entry) in zip(figure.subplots(1, 2), record["scaling"].items(), strict=True):
        sizes = [int(size) for size in entry["seconds"]]
        times = [value * 1e3 for value in entry["seconds"].values()]
        axis.loglog(sizes, times, "o-", label=f"auto, exponent {entry['exponent']:.2f}")
        axis.loglog(sizes, [times[0] * size / sizes[0] for size in sizes], ":", label="linear")
        axis.set(xlabel=name, ylabel="ms")
        axis.legend()
    figure.savefig(out / "scaling.svg")

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    rows = record["rows"]
    places = range(len(rows))
    axis.barh(
        [p + 0.2 for p in places], [row["svd"] / row["floor"] for row in rows], 0.4, label="torch.linalg.svd"
    )
    axis.barh([p - 0.2 for p in places], [row["over_floor"] for row in rows], 0.4, label="wellcond auto")
    axis.set_yticks(list(places), [f"{row['label']}, κ {row['kappa']}" for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(
        xscale="log",
        xlim=(1, None),
        xlabel="time over the floor (one Gram product and one application, float32)",
    )
    axis.legend()
    figure.savefig(out / "ratios.svg")
