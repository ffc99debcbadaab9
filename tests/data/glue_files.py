"""GLUE's official files, written from a few sentences: the same columns, in the same places, with the same oddities."""

import random
from pathlib import Path

from wellcond.data.glue import GLUE, GlueTask

HEADS = {
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
    "sentence2_parse sentence1 sentence2 label1 gold_label",
    "sst2": "sentence label",
    "rte": "index sentence1 sentence2 label",
    "qnli": "index question sentence label",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "cola": "",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
}
MNLI_DEV = HEADS["mnli"].replace("label1", "label1 label2 label3 label4 label5")
GOOD, BAD = (["fine", "clear", "bright", "warm"], ["dull", "grey", "cold", "broken"])
THINGS = ["river", "house", "garden", "story", "machine", "letter"]


def sentences(task: GlueTask, number: int, draw: random.Random) -> tuple[str, str, int]:
    """Two sentences and the class of the pair; a word tells it, so that a small model can learn it."""
    classes = max(2, len(task.classes))
    label = number % classes
    words = [GOOD, BAD, THINGS][label]
    first = f"the {draw.choice(THINGS)} is {draw.choice(words)} and {draw.choice(words)}"
    return first, f'they say "the {draw.choice(THINGS)}" was {draw.choice(words)}', label


def write_file(task: GlueTask, path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    head = MNLI_DEV if path.name.startswith("dev_m") else HEADS[task.name]
    names = head.split("|") if "|" in head else head.split()
    lines = ["\t".join(names)] if names else []
    for i in range(count):
        first, second, number = sentences(task, i, draw)
        label = f"{5 * number / 1:.3f}" if task.regression else (task.written or task.classes)[number]
        if task.name == "cola":
            lines.append("\t".join(["gj04", label, "" if number else "*", first]))
            continue
        fields = dict.fromkeys(names, "x")
        texts = (first, second)[: len(task.columns) - 1]
        fields |= dict(zip(map(str, task.columns), (*texts, label), strict=True))
        lines.append("\t".join(fields[name] for name in names))
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = "\ufeff" if task.name == "mrpc" else ""  # as the published files have it
    path.write_bytes((mark + "\n".join(lines) + "\n").encode())


def write_glue(root: Path, names: tuple[str, ...] = tuple(GLUE), train: int = 60, dev: int = 24) -> Path:
    """``root/TITLE/train.tsv`` and ``dev.tsv`` of these tasks."""
    for name in names:
        task = GLUE[name]
        write_file(task, root / task.title / "train.tsv", train, 0)
        for number, file in enumerate(task.parts.values()):
            write_file(task, root / task.title / file, dev, 1 + number)
    return root
