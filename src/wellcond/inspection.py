"""`wellcond inspect`: a model's tokens and every attention layer, before and after conditioning, as one table."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellcond.attach import ConditionHandle, attach_, condition_, remove_
from wellcond.checkpoint import record_of
from wellcond.config import ConditioningConfig, Scope
from wellcond.linalg import spectrum
from wellcond.memory import Record, recall
from wellcond.monitor import Row, measure
from wellcond.monitor.attention import AttentionReader, AttentionWatch
from wellcond.running import call_model, undisturbed
from wellcond.sites import REGISTRY
from wellcond.static import calibrate_
from wellcond.targets import Subject, load

if TYPE_CHECKING:
    from rich.table import Table

ATTENTION = {"attention.output": "softmax(QKᵀ)V", "attention.weights": "softmax(QKᵀ)"}


Shapes = dict[tuple[str, str], tuple[int, int]]
"""Rows and columns by site and path."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One matrix, or the mean over heads and samples of several, at one moment.

    Attributes:
        rank: the smallest.
        kappa, kappa_pinv: means; κ is inf where one matrix is rank-deficient.
    """

    rank: int
    kappa: float
    kappa_pinv: float


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        what: ``"tokens"``, ``"embedding table"``, ``"softmax(QKᵀ)V"`` or ``"softmax(QKᵀ)"``.
        layer: index of the attention layer; None for tokens.
        module: its path.
        shape: of one matrix: N×d of one head for attention; its softmax is N×N, or d×d over channels.
        heads: how many heads are averaged; None for tokens.
        samples: how many matrices are averaged, of each head.
        before, after: without and with conditioning.
    """

    what: str
    layer: int | None
    module: str
    shape: tuple[int, int]
    heads: int | None
    samples: int
    before: Reading
    after: Reading


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The table and what it is about."""

    subject: Subject
    config: ConditioningConfig
    site: str
    lines: list[Line]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; infinite numbers as the string ``"inf"``."""
        return {
            "target": self.subject.name,
            "model": type(self.subject.model).__name__,
            "weights": self.subject.weights,
            "data": self.subject.data,
            "conditioning": self.config.to_dict(),
            "site": self.site,
            "rows": [finite(dataclasses.asdict(line)) for line in self.lines],
        }


def inspect(
    target: str,
    text: Path | None = None,
    images: Path | None = None,
    json: bool = False,
    plot: Path | None = None,
    scope: Scope | None = None,
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
        json: print JSON instead of a table.
        plot: write a plot to this file (png, svg or pdf).
        scope: sample, table or static; default table on decoders and sample elsewhere, or as the checkpoint says.
        samples: sequences or images at most.
        length: tokens per sequence.
        pretrained: load timm's pretrained weights (from the network); otherwise they are random.
    """
    subject = load(target, text=text, images=images, samples=samples, length=length, pretrained=pretrained)
    found = examine(subject, scope)
    if json:
        print(json_module.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(found)
    if plot is not None:
        draw(found, plot)
    return 0


def examine(subject: Subject, scope: Scope | None = None) -> Inspection:
    """Measure a subject without and with conditioning; its model is afterwards without."""
    model, batch = subject.model, subject.batch
    record = record_of(model) or recall(model)
    remove_(model)
    before = measure(model, batch)
    shapes = shapes_of(model, batch)
    table_before = table_of(model)
    handle = attach(model, record, scope)
    assert handle.config is not None
    if handle.config.scope == "static" and handle.config.sigma is None:
        calibrate_(model, [batch])
    try:
        after = [row for row in measure(model, batch) if not row.site.startswith("conditioned.")]
        lines = [
            line(group, others, shapes) for group, others in zip(grouped(before), grouped(after), strict=True)
        ]
        table_after = table_of(model)
        if handle.config.scope == "table" and table_before is not None and table_after is not None:
            lines.insert(0, table_line(handle.sites[0].module, table_before, table_after))
        return Inspection(subject, handle.config, handle.sites[0].module, lines)
    finally:
        handle.remove()


def attach(model: nn.Module, record: Record | None, scope: Scope | None) -> ConditionHandle:
    """Condition by the scope asked for, else as the model or its checkpoint was, else by default."""
    if record is None or (scope is not None and scope != record.config.scope):
        return condition_(model, ConditioningConfig(scope=scope))
    return condition_(model, record.config)


def table_of(model: nn.Module) -> Tensor | None:
    """All rows that the token embedding of a known model returns now; None where it has none."""
    known = REGISTRY.known_models(model)
    if len(known) != 1 or known[0].sites.table is None:
        return None
    table: Any = known[0].module.get_submodule(known[0].sites.table)
    with undisturbed(model):
        rows: Tensor = table(torch.arange(table.num_embeddings, device=next(table.parameters()).device))
    return rows


def table_line(path: str, before: Tensor, after: Tensor) -> Line:
    """The line of an embedding table."""
    shape = (before.shape[0], before.shape[1])
    return Line("embedding table", None, path, shape, None, 1, *(table_reading(t) for t in (before, after)))


def table_reading(table: Tensor) -> Reading:
    """A matrix that is not averaged over anything."""
    found = spectrum(table)
    return Reading(int(found.rank), found.kappa.item(), found.kappa_pinv.item())


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the same place and layer together, in order: the heads of a layer become one group."""
    groups: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.site, row.layer), []).append(row)
    return list(groups.values())


def line(before: list[Row], after: list[Row], shapes: Shapes) -> Line:
    """One line from the rows of a group's heads, without and with conditioning."""
    first = before[0]
    return Line(
        what=ATTENTION.get(first.site, first.site),
        layer=first.layer,
        module=first.module,
        shape=shapes[first.site, first.module if first.layer is not None else ""],
        heads=len(before) if first.layer is not None else None,
        samples=first.samples,
        before=reading(before),
        after=reading(after),
    )


def reading(rows: list[Row]) -> Reading:
    """Means over the heads of a layer."""
    return Reading(
        min(row.rank for row in rows),
        sum(row.kappa for row in rows) / len(rows),
        sum(row.kappa_pinv for row in rows) / len(rows),
    )


class ShapeOfTokens(nn.Module):
    """Keeps the N×d of the tokens that pass."""

    shape = (0, 0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.shape = (x.shape[-2], x.shape[-1])
        return x


class ShapeReader(AttentionReader):
    """Keeps the shapes of what a layer's heads compute and of their softmax, in place of the spectra."""

    shape = weights_shape = (0, 0)

    def read_outputs(self, per_head: Tensor) -> None:
        self.shape = (per_head.shape[-2], per_head.shape[-1])

    def read_weights(self, weights: Tensor) -> None:
        self.weights_shape = (weights.shape[-2], weights.shape[-1])


def shapes_of(model: nn.Module, batch: Any) -> Shapes:
    """The shape of one matrix by site and path of the attention layer; of the tokens by ``"tokens"`` and ``""``."""
    modules = REGISTRY.attention_modules(model)
    readers = {module: ShapeReader(module, kind, lambda: None) for _, module, kind in modules}
    tokens = ShapeOfTokens()
    watch = AttentionWatch(dict(readers))
    handle = attach_(model, tokens, None, "input")
    try:
        with undisturbed(model), watch:
            call_model(model, batch)
    finally:
        watch.remove()
        handle.remove()
    shapes = {("tokens", ""): tokens.shape}
    for path, module, _ in modules:
        shapes["attention.output", path] = readers[module].shape
        shapes["attention.weights", path] = readers[module].weights_shape
    return shapes


def finite(value: Any) -> Any:
    """JSON has no infinity: the string ``"inf"`` stands for it, ``"nan"`` for what is not a number.

    >>> finite({"kappa": [float("inf"), 1.5]})
    {'kappa': ['inf', 1.5]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------- showing


def show(found: Inspection) -> None:
    """Print the table: in colour on a terminal, plain otherwise."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, no_color=True, width=140)
    subject, config = found.subject, found.config
    console.print(
        f"{subject.name}: {type(subject.model).__name__}, weights {subject.weights}", soft_wrap=True
    )
    console.print(f"Data: {subject.data}", soft_wrap=True)
    console.print(f"Conditioned: scope {config.scope} at {found.site or 'the input'}", soft_wrap=True)
    console.print(table(found.lines))
    console.print(
        "κ = σ₁/σ_min, infinite where the rank is short of min(N, d); κ⁺ = σ₁/σ_rank. Means over samples"
    )
    console.print(
        "and heads; rank is the smallest of them. Layers: what a head computes, and its softmax weights."
    )


def table(lines: Sequence[Line]) -> Table:
    """The lines as a table of rich."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("layer", "what", "N×d"):
        grid.add_column(name, no_wrap=True)
    for name in ("rank", "κ", "κ⁺", "rank after", "κ after", "κ⁺ after"):
        grid.add_column(name, justify="right", no_wrap=True)
    for entry in lines:
        heads = "" if entry.heads is None else f" × {entry.heads}"
        cells = [
            str(part)
            for one in (entry.before, entry.after)
            for part in (one.rank, number(one.kappa), number(one.kappa_pinv))
        ]
        layer = "" if entry.layer is None else str(entry.layer)
        grid.add_row(layer, entry.what, f"{entry.shape[0]}×{entry.shape[1]}{heads}", *cells)
    return grid


def number(value: float) -> str:
    """Three digits.

    >>> [number(v) for v in (1.0, 12345.6, float("inf"))]
    ['1.00', '1.23e+04', '∞']
    """
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}" if value >= 1000 else f"{value:#.3g}"


def draw(found: Inspection, path: Path) -> None:
    """κ⁺ of tokens and of each layer's heads, before and after, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [entry for entry in found.lines if entry.what in ("tokens", ATTENTION["attention.output"])]
    places = range(len(shown))
    for moment, marker, colour in (("before", "o", "#5b6472"), ("after", "s", "#0072b2")):
        values = [getattr(entry, moment).kappa_pinv for entry in shown]
        axes.plot(places, values, marker=marker, color=colour, label=f"{moment} conditioning")
    axes.set_yscale("log")
    axes.set_xticks(list(places), ["tokens" if e.layer is None else str(e.layer) for e in shown])
    axes.set_xlabel("attention layer, mean over heads")
    axes.set_ylabel("κ⁺ of softmax(QKᵀ)V")
    axes.set_title(f"{found.subject.name}, scope {found.config.scope}")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
