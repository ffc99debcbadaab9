"""Arms × seeds into a run folder, resumable: what is finished is not run again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wellcond.monitor import JsonLines, append_lines, read_lines
from wellcond.recipes import Recipe
from wellcond.report.folder import MeasuredRow, read_rows
from wellcond.report.kappas import panels
from wellcond.statistics import Estimate, estimate, paired_difference, verdict
from wellcond.tasks import Metric
from wellcond.training.arms import ARMS, Arm
from wellcond.training.nonfinite import NonFiniteLoss
from wellcond.training.records import complete_lines, found_in, replace_lines, write_json, write_run
from wellcond.training.run import Keeping, RunResult, started_processes, train_arm

AT_THE_END = 10**9
"""Optimizer steps between checkpoints where only the one of the last step is wanted."""

Announce = Callable[[str, int, int], None]
"""Called with (which run, steps done, steps in all)."""


@dataclasses.dataclass(frozen=True)
class ArmSummary:
    """One arm's line of the table; each κ has the keys tokens, first_layer and all_layers.

    Attributes:
        kappa: averaged over training, as in the bars of the paper's Figures 2 to 4.
        kappa_start, kappa_end: at the first and the last measurement.
    """

    arm: Arm
    metric: Estimate
    difference: Estimate | None
    verdict: str
    kappa: dict[str, float]
    kappa_start: dict[str, float]
    kappa_end: dict[str, float]
    relative_step_time: float | None

    def to_dict(self) -> dict[str, Any]:
        """As ``summary.json`` holds it."""
        line = {key: value for key, value in dataclasses.asdict(self.metric).items() if key != "effect"}
        difference = None
        if self.difference is not None:
            difference = {
                key: value for key, value in dataclasses.asdict(self.difference).items() if key != "n"
            }
        return {
            **line,
            "difference": difference,
            "verdict": self.verdict,
            "kappa": self.kappa,
            "kappa_start": self.kappa_start,
            "kappa_end": self.kappa_end,
            "relative_step_time": self.relative_step_time,
        }


def compare(
    recipe: Recipe,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    folder: Path,
    *,
    command: str,
    hypotheses: Sequence[str] = (),
    max_steps: int | None = None,
    subset: int | None = None,
    weights: Path | None = None,
    pretrained: str | None = None,
    announce: Announce | None = None,
    finished: Callable[[RunResult], None] | None = None,
) -> list[ArmSummary]:
    """Train every arm with every seed and write ``folder``; runs that it holds already are kept.

    Args:
        recipe: the experiment.
        arms: the first, or the one named baseline, is what the others are compared with.
        seeds: paired: an arm's run and the baseline's share weights and order of data.
        folder: where ``run.json``, ``results.jsonl``, ``rows.jsonl``, ``spectra.json`` and ``summary.json`` go,
            and ``examples.json`` where the task has something to look at.
        command: how to run it again.
        hypotheses: what was expected before the run.
        max_steps, subset: a shorter training, on fewer samples, see `train_arm`.
        weights: keep the checkpoint at the end of every run, in ``weights/ARM/SEED``; None: none is kept.
        pretrained: folder of the model that a fine-tuning starts from; ``{arm}`` and ``{seed}`` in it stand for the
            run's own, so that an arm is fine-tuned as it was pretrained.
        announce, finished: told of progress.

    Returns:
        The table, one line an arm.

    Raises:
        ValueError: the folder holds runs of another experiment, or several processes were started.
        NonFiniteLoss: a run's loss is not finite; finished runs are kept.
    """
    if started_processes() > 1:
        raise ValueError(
            f"a comparison runs in one process, and {started_processes()} were started: they would write over each "
            f"other. Leave torchrun out, or train arm by arm with `torchrun ... -m wellcond train`"
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = _resume(folder)
    known = [*arms, *(arm for arm in ARMS if arm not in arms and any(arm.name == name for name, _ in done))]
    shorter = {
        name: value for name, value in (("max_steps", max_steps), ("subset", subset)) if value is not None
    }
    all_seeds = sorted({*seeds, *(seed for _, seed in done)})

    def starting(arm: Arm, seed: int) -> Recipe:
        return recipe if pretrained is None else recipe.from_pretrained(place_of(pretrained, arm, seed))

    data = starting(arms[0], seeds[0]).data()
    options = shorter | found_in(data) | ({} if pretrained is None else {"pretrained": pretrained})
    write_run(folder, recipe, known, all_seeds, command, hypotheses, options=options)
    spectra_file = folder / "spectra.json"
    spectra = json.loads(spectra_file.read_text()) if spectra_file.is_file() else {}
    examples_file = folder / "examples.json"
    examples = json.loads(examples_file.read_text()) if examples_file.is_file() else {}
    for seed in seeds:
        for arm in arms:
            if (arm.name, seed) in done:
                continue

            def progress(step: int, steps: int, name: str = f"{arm.name}, seed {seed}") -> None:
                if announce is not None:
                    announce(name, step, steps)

            try:
                result = train_arm(
                    starting(arm, seed),
                    data,
                    arm,
                    seed,
                    folder / "trainer" if weights is None else weights / arm.name / str(seed),
                    progress,
                    max_steps=max_steps,
                    subset=subset,
                    keeping=Keeping(save_every=None if weights is None else AT_THE_END),
                )
            except NonFiniteLoss as error:
                raise NonFiniteLoss(f"arm {arm.name}, seed {seed}: {error}") from error
            # The line in results.jsonl comes last: a run without it counts as not done, and its rows are dropped.
            JsonLines(folder / "rows.jsonl", arm=arm.name, seed=seed)(result.rows)
            spectra.setdefault(arm.name, result.spectra)
            write_json(spectra_file, spectra)
            if result.examples and arm.name not in examples:
                examples[arm.name] = result.examples
                write_json(examples_file, examples)
            append_lines(folder / "results.jsonl", [result.line()])
            if finished is not None:
                finished(result)
    table = summarise(folder, known, recipe.task.metric)
    write_json(folder / "summary.json", {line.arm.name: line.to_dict() for line in table})
    return table


def place_of(pattern: str, arm: Arm, seed: int) -> Path:
    """The folder that a pattern with ``{arm}`` and ``{seed}`` means for a run.

    >>> from wellcond.training.arms import select_arms
    >>> place_of("weights/{arm}/{seed}", *select_arms(["baseline"]), 2).as_posix()
    'weights/baseline/2'
    """
    return Path(pattern.replace("{arm}", arm.name).replace("{seed}", str(seed)))


def summarise(folder: Path, arms: Sequence[Arm], metric: Metric) -> list[ArmSummary]:
    """The table of a folder, from ``results.jsonl`` and ``rows.jsonl``."""
    results = read_lines(folder / "results.jsonl")
    names = [arm.name for arm in arms]
    kappas = _kappas(read_rows(folder / "rows.jsonl", names) or (), names)
    by_arm = {name: {line["seed"]: line for line in results if line["arm"] == name} for name in names}
    base = next((name for name in names if name == "baseline"), names[0])
    baseline = {seed: line["metrics"][metric.name] for seed, line in by_arm[base].items()}
    table = []
    for arm in arms:
        lines = by_arm[arm.name]
        values = {seed: line["metrics"][metric.name] for seed, line in lines.items()}
        difference = paired_difference(values, baseline) if arm.name != base else None
        times = [
            line["seconds_per_step"] / by_arm[base][seed]["seconds_per_step"]
            for seed, line in lines.items()
            if seed in by_arm[base]
        ]
        table.append(
            ArmSummary(
                arm=arm,
                metric=estimate(list(values.values())),
                difference=difference,
                verdict=""
                if arm.name == base
                else verdict(difference, higher_is_better=metric.higher_is_better),
                **kappas[arm.name],
                relative_step_time=math.exp(sum(map(math.log, times)) / len(times)) if times else None,
            )
        )
    return table


def _kappas(rows: Sequence[MeasuredRow], names: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Per arm the three κ of `ArmSummary`, means over seeds; κ⁺ where κ is infinite in one of the arms."""
    found: dict[str, dict[str, dict[str, float]]] = {
        name: {"kappa": {}, "kappa_start": {}, "kappa_end": {}} for name in names
    }
    for panel in panels(rows, names):
        for arm, values in panel.values.items():
            found[arm]["kappa"][panel.quantity] = float(values.mean())
            found[arm]["kappa_start"][panel.quantity] = float(values[:, 0].mean())
            found[arm]["kappa_end"][panel.quantity] = float(values[:, -1].mean())
    return found


def _resume(folder: Path) -> set[tuple[str, int]]:
    """Which runs are finished; rows of runs that were cut off are dropped, they will be made again."""
    results, rows = folder / "results.jsonl", folder / "rows.jsonl"
    done = {(line["arm"], line["seed"]) for line in complete_lines(results)} if results.is_file() else set()
    if rows.is_file():
        kept = [line for line in complete_lines(rows) if (line["arm"], line["seed"]) in done]
        replace_lines(rows, kept)
    return done
