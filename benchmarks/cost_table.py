"""The README's table of cost, from a full benchmark: ``python benchmarks/cost_table.py records/DATE-bench``."""

import json
import sys
from pathlib import Path

NAMES = {
    "ViT-B": "ViT-B/16",
    "DeiT-B": "DeiT-B, distilled",
    "Swin-B": "Swin-B",
    "DaViT-B": "DaViT-B",
    "XCiT-M": "XCiT-M24/16",
    "BERT": "Crammed BERT",
    "GPT-2 sequence": "GPT-2, a sequence",
    "GPT-2 table": "GPT-2, the table",
    "LRA": "Nyströmformer, 2 layers",
    "detection": "detection",
}


def between(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def cost_table(folder: Path) -> list[str]:
    """Lines of Markdown: milliseconds of a batch and the speed against the SVD, each from lowest to highest κ(X)."""
    record = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    shares = {step["shape"]: step["share"] for step in record["steps"]}
    columns = "Model", "tokens", "polar factor, ms a batch", "times faster than the SVD", "share of a step"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for shape, name in NAMES.items():
        rows = [row for row in record["rows"] if row["shape"] == shape]
        batch = "×".join(map(str, rows[0]["size"]))
        times = between([row["auto"] * 1e3 for row in rows], 0)
        faster = between([row["speedup"] for row in rows], 1)
        share = f"{shares[shape]:.2%}" if shape in shares else "–"
        lines.append(f"| {name} | {batch} | {times} | {faster} | {share} |")
    return lines


if __name__ == "__main__":
    print("\n".join(cost_table(Path(sys.argv[1]))))
