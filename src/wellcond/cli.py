"""The command line: small functions, one a subcommand. Heavy imports stay inside them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from wellcond.recipes import Recipe, Source

Names = Annotated[str, tyro.conf.arg(metavar="NAME,NAME,...")]
DataFolder = Annotated[Path | None, tyro.conf.arg(aliases=["--text"])]
DEMO_ARMS = "baseline,conditioned,conditioned-tokens,rescaled,scaled"


def demo(
    seeds: int = 3, epochs: int | None = None, out: Path = Path("runs/demo"), arms: Names = DEMO_ARMS
) -> int:
    """Train a small ViT on real digits, with and without conditioning, and write a report.

    Args:
        seeds: how many seeds each arm is trained with.
        epochs: passes over the training images; default: the recipe's.
        out: folder of the results; finished runs in it are kept.
        arms: what to train, see `wellcond recipes`.
    """
    return compare("digits-vit", seeds=seeds, epochs=epochs, out=out, arms=arms)


def compare(
    recipe: tyro.conf.Positional[str],
    seeds: int = 5,
    epochs: int | None = None,
    out: Path | None = None,
    arms: Names | None = None,
    hypotheses: Path | None = None,
    budget: str | None = None,
    max_steps: int | None = None,
    subset: int | None = None,
    pretrained: str | None = None,
    weights: Path | None = None,
    data_dir: DataFolder = None,
    hub: bool = False,
    corrupt: Literal["fatal", "skip"] = "fatal",
) -> int:
    """Train a recipe in several arms with paired seeds; table, plots and report. Resumable.

    Args:
        recipe: a name that `wellcond recipes` lists.
        seeds: how many seeds each arm is trained with, from 0.
        epochs: passes over the training data; default: the recipe's.
        out: folder of the results, default runs/RECIPE; finished runs in it are kept.
        arms: what to train, see `wellcond recipes`; default: the recipe's.
        hypotheses: text file with a line for each thing you expect, written before the run; the report repeats it.
        budget: for Crammed BERT, another budget: micro-batches, or hours of this machine such as 24h.
        max_steps: stop after so many optimizer steps; the learning rate's schedule ends there too.
        subset: train and test on so many samples each, spread over the data.
        pretrained: folder of the model that a fine-tuning starts from, or file of a detector's ImageNet weights;
            {arm} and {seed} in it stand for the run's own.
        weights: keep the checkpoint at the end of every run in this folder, as ARM/SEED.
        data_dir: folder of the data, where the recipe reads one; for language models any folder of text.
        hub: stream the data from the Hugging Face hub, where the recipe can.
        corrupt: what to do about a training image that cannot be read; skip takes the next one in its place.
    """
    import dataclasses
    import time

    from wellcond.report import read_run, write_report
    from wellcond.report.words import verdicts
    from wellcond.training.arms import select_arms
    from wellcond.training.compare import compare as compare_arms
    from wellcond.training.console import make_console, measurements_table, narrated, results_table

    chosen = _chosen(recipe, budget).from_source(_source(data_dir, hub, corrupt))
    _require_counts(seeds=seeds, epochs=epochs, max_steps=max_steps, subset=subset)
    if epochs is not None:
        chosen = dataclasses.replace(chosen, epochs=epochs, steps=None)
    selected = select_arms(chosen.arms if arms is None else [name.strip() for name in arms.split(",")])
    folder = out or Path("runs") / recipe
    length = chosen.length if max_steps is None else f"at most {max_steps:,} steps"

    console = make_console()
    console.print(f"{chosen.title}: {len(selected)} arms × {seeds} seeds, {length} each, into {folder}/")
    started = time.monotonic()
    with narrated(console, len(selected) * seeds) as narrator:
        table = compare_arms(
            chosen,
            selected,
            range(seeds),
            folder,
            command=shlex.join(["wellcond", *sys.argv[1:]]),
            hypotheses=[] if hypotheses is None else hypotheses.read_text(encoding="utf-8").splitlines(),
            max_steps=max_steps,
            subset=subset,
            weights=weights,
            pretrained=pretrained,
            announce=narrator.announce,
            finished=narrator.finished,
        )
    report_page = write_report(folder)
    console.print(results_table(table, metric=chosen.task.metric.name, unit=chosen.task.metric.unit))
    console.print(measurements_table(table))
    console.print(
        "κ at the start → at the end of training, κ⁺ where κ is infinite; attention: every head's "
        "softmax(QKᵀ/√d)V, mean over all layers."
    )
    for verdict in verdicts(read_run(folder)):
        console.print(f"{verdict.head} {verdict.detail}")
    console.print(f"Finished in {time.monotonic() - started:.0f} s.")
    console.print(f"Report: {report_page}", soft_wrap=True)
    console.print(f"Plots:  {folder / 'plots'}/   Rows: {folder / 'rows.jsonl'}", soft_wrap=True)
    return 0


def train(
    recipe: tyro.conf.Positional[str],
    data_dir: DataFolder = None,
    hub: bool = False,
    corrupt: Literal["fatal", "skip"] = "fatal",
    conditioned: bool = False,
    arm: str | None = None,
    out: Path | None = None,
    budget: str | None = None,
    max_steps: int | None = None,
    subset: int | None = None,
    save_every: int | None = None,
    micro_batch: int | None = None,
    pretrained: Path | None = None,
    resume: bool = False,
    seed: int = 0,
) -> int:
    """Train one arm of a recipe with one seed; checkpoints, and --resume after a stop. Runs under torchrun too.

    Args:
        recipe: a name that `wellcond recipes` lists.
        data_dir: folder of the data, where the recipe reads one; for language models any folder of text.
        hub: stream the data from the Hugging Face hub, where the recipe can.
        corrupt: what to do about a training image that cannot be read; skip takes the next one in its place.
        conditioned: the same as --arm conditioned.
        arm: what to train, see `wellcond recipes`; default: baseline.
        out: folder of the results, default runs/RECIPE-ARM-seedSEED.
        budget: for Crammed BERT, another budget: micro-batches, or hours of this machine such as 24h.
        max_steps: stop after so many optimizer steps; the learning rate's schedule ends there too.
        subset: train and test on so many samples each, spread over the data.
        save_every: optimizer steps between checkpoints; default: at every evaluation.
        micro_batch: samples that one process takes through the model at once; gradients are summed up to the batch.
        pretrained: folder of the model that a fine-tuning starts from, or file of a detector's ImageNet weights.
        resume: go on from the last checkpoint in the folder.
        seed: of weights and order of data.
    """
    import dataclasses

    from wellcond.training.arms import select_arms
    from wellcond.training.console import make_console, told
    from wellcond.training.train import checkpoints_of, is_first_process
    from wellcond.training.train import train as train_run

    if conditioned and arm not in (None, "conditioned"):
        raise ValueError(f"--conditioned means --arm conditioned, but --arm is {arm}; give one of them")
    chosen = _chosen(recipe, budget).from_source(_source(data_dir, hub, corrupt))
    if pretrained is not None:
        chosen = chosen.from_pretrained(pretrained)
    data = chosen.data()
    (selected,) = select_arms(["conditioned" if conditioned else arm or "baseline"])
    _require_counts(max_steps=max_steps, subset=subset, save_every=save_every, micro_batch=micro_batch)
    if micro_batch is not None:
        chosen = dataclasses.replace(chosen, micro_batch=micro_batch)
    folder = out or Path("runs") / f"{recipe}-{selected.name}-seed{seed}"

    console = make_console(quiet=not is_first_process())
    console.print(f"{chosen.title}: {selected.name}, seed {seed}, into {folder}/")
    with told(console, f"{selected.name}, seed {seed}") as (progress, score):
        result = train_run(
            chosen,
            selected,
            seed,
            folder,
            data=data,
            command=shlex.join(["wellcond", *sys.argv[1:]]),
            max_steps=max_steps,
            subset=subset,
            save_every=save_every,
            pretrained=pretrained,
            resume=resume,
            progress=progress,
            score=score,
        )
    metric = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    console.print(f"Finished: {metric}")
    if is_first_process():
        from wellcond.report import write_report

        console.print(f"Report:      {write_report(folder)}", soft_wrap=True)
    console.print(f"Checkpoints: {checkpoints_of(folder)}/   Rows: {folder / 'rows.jsonl'}", soft_wrap=True)
    return 0


def _require_counts(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} counts from 1, got {value}")


def _chosen(name: str, budget: str | None) -> Recipe:
    from wellcond.recipes import RECIPES

    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name] if budget is None else RECIPES[name].from_budget(budget)


def _source(data_dir: Path | None, hub: bool, corrupt: Literal["fatal", "skip"]) -> Source:
    from wellcond.recipes import Source

    return Source(data_dir, hub, corrupt)


def inspect(
    target: tyro.conf.Positional[str],
    text: Path | None = None,
    images: Path | None = None,
    json: bool = False,
    plot: Path | None = None,
    scope: Literal["sample", "table", "static"] | None = None,
    samples: int = 4,
    length: int = 128,
    pretrained: bool = False,
) -> int:
    """Condition numbers of a model's tokens and attention layers, before and after conditioning.

    Args:
        target: a timm model, the folder of a Hugging Face model (or a .gguf file), or module:function that returns a
            model or (model, batch).
        text: file that a language model reads; default Python's own reference.
        images: image or folder for a vision model; default scikit-learn's photographs.
        json: print JSON in place of the table.
        plot: write a plot to this file (png, svg or pdf).
        scope: default table on decoders and sample elsewhere, or as the checkpoint was trained.
        samples: sequences or images at most.
        length: tokens per sequence.
        pretrained: load timm's pretrained weights, from the network or its cache; otherwise they are random.
    """
    from wellcond.inspection import inspect as look

    return look(target, text, images, json, plot, scope, samples, length, pretrained)


def report(folder: tyro.conf.Positional[Path]) -> int:
    """Draw the plots and the page of a run folder again.

    Args:
        folder: what `demo` or `compare` wrote.
    """
    from wellcond.report import write_report

    print(f"Report: {write_report(folder)}")
    return 0


def glue(runs: tyro.conf.Positional[Path] = Path("runs")) -> int:
    """Print GLUE's table in the paper's order: each arm's scores, and its differences to the baseline with intervals.

    Args:
        runs: folder with the results of `compare` on the eight tasks, each in glue-TASK.
    """
    from wellcond.report.glue import glue_markdown, read_glue_table

    print(glue_markdown(read_glue_table(runs)), end="")
    return 0


def recipes() -> int:
    """List the experiments and the arms."""
    from rich.table import Table

    from wellcond.recipes import RECIPES
    from wellcond.training.arms import ARMS
    from wellcond.training.console import make_console

    console = make_console()
    table = Table("recipe", "what", "length", "expected cost", "paper: baseline, conditioned")
    for recipe in RECIPES.values():
        paper = f"{recipe.paper.baseline} %, {recipe.paper.conditioned} %" if recipe.paper else ""
        table.add_row(recipe.name, recipe.title, recipe.length, recipe.cost, paper)
    console.print(table)
    table = Table("arm", "what")
    for arm in ARMS:
        table.add_row(arm.name, arm.description)
    console.print(table)
    return 0


def theory(
    model: tyro.conf.Positional[str],
    data: Path | None = None,
    pretrained: bool = False,
    samples: int = 2,
    layer: int = 0,
    seed: int = 0,
) -> int:
    """Print how tight each bound of the paper is on a timm vision transformer and real images.

    Args:
        model: a timm name, such as vit_base_patch16_224.
        data: an image or a folder of images; default: scikit-learn's two photographs.
        pretrained: load timm's weights, from the network or its cache; otherwise they are random.
        samples: how many images.
        layer: which attention layer, from 0.
        seed: of random weights.
    """
    from wellcond.theory import run

    run(model, data, pretrained=pretrained, samples=samples, layer=layer, seed=seed)
    return 0


def bench(quick: bool = False, explain: bool = False, out: Path | None = None) -> int:
    """Measure the cost of the correction on this machine, against an SVD and other peers.

    Args:
        quick: smaller batches, fewer rounds.
        explain: print only which method `auto` chooses for every shape, and why.
        out: folder for bench.json and plots; nothing is written without it.
    """
    from wellcond.bench import bench as run_bench

    return run_bench(quick, explain, out)


COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "inspect": inspect,
    "compare": compare,
    "train": train,
    "report": report,
    "glue": glue,
    "recipes": recipes,
    "theory": theory,
    "bench": bench,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; a mistake of the user ends with one sentence and exit code 2, not with a traceback."""
    try:
        status: int = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="wellcond",
            description="Measure, fix and compare the conditioning of transformers.",
            args=args,
        )
        return status
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        print(f"wellcond: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"wellcond: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "wellcond: stopped; what is finished is kept: the same command goes on from there (train: with --resume)",
            file=sys.stderr,
        )
        return 130
