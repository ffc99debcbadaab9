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


def cost_table(folder: Path) -> list[str]:
    """Lines of Markdown: milliseconds of a batch and the speed against the SVD, each from lowest to highest κ(X)."""
    record = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    shares = {step["shape"]: step for step in record["steps"]}
    lines = [
        "| Model | tokens | polar factor, ms a batch | times faster than the SVD | share of a forward and backward |"
    ]
    lines.append("|---|---|---|---|---|")
    for shape, name in NAMES.items():
        rows = [row for row in record["rows"] if row["shape"] == shape]
        batch = "×".join(map(str, rows[0]["size"]))
        times = [row["auto"] * 1e3 for row in rows]
        faster = [row["speedup"] for row in rows]
        share = f"{shares[shape]['share']:.2%}" if shape in shares else "–"
        lines.append(
            f"| {name} | {batch} | {min(times):.0f} to {max(times):.0f} | {min(faster):.1f} to {max(faster):.1f} | {share} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(cost_table(Path(sys.argv[1]))))
