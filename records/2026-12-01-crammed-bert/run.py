"""Pretrain a tiny Crammed BERT in five arms, fine-tune baseline and conditioned; three seeds each.

python records/2026-12-01-crammed-bert/run.py OUT
"""

import sys
from pathlib import Path

from wellcond.recipes import RECIPES
from wellcond.report import write_report
from wellcond.training.arms import select_arms
from wellcond.training.compare import compare
from wellcond.training.run import RunResult

SEEDS = range(3)
HERE = Path(__file__).parent


def told(result: RunResult) -> None:
    print(result.arm, result.seed, result.metrics, flush=True)


def main(out: Path) -> None:
    hypotheses = (HERE / "hypotheses.txt").read_text().splitlines()
    shared = {"command": f"python {' '.join(sys.argv)}", "hypotheses": hypotheses, "finished": told}
    pretraining, pairs = RECIPES["crammed-bert-pydoc"], RECIPES["gloss-pairs"]
    compare(
        pretraining,
        select_arms(pretraining.arms),
        SEEDS,
        out / "pretraining",
        weights=out / "weights",
        **shared,
    )
    pretrained = f"{out}/weights/{{arm}}/{{seed}}"
    fine = out / "gloss-pairs"
    compare(pairs, select_arms(["baseline", "conditioned"]), SEEDS, fine, pretrained=pretrained, **shared)
    for folder in (out / "pretraining", fine):
        write_report(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
