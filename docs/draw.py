"""Draws the pictures of the documentation with wellcond itself: ``make docs-figures`` writes docs/pictures/*.svg.

Everything is computed here, on two photographs that scikit-learn ships and on random weights of seed 0; only the
pictures of the tangent kernel and of the leak read a record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import timm
import torch
from matplotlib import pyplot as plt
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.report import read_run
from wellcond.report.detections import detections_figure, read_examples
from wellcond.report.prefix import prefix_figure, prefix_lines
from wellcond.report.style import LIGHT
from wellcond.theory import fixed_correction
from wellcond.theory.on_model import load_images, tokens_and_inputs

HERE = Path(__file__).parent
WITHOUT, WITH, THIRD = "#5b6472", "#0072b2", "#d55e00"
CONTROLS = {
    "baseline": (WITHOUT, "o"), "constant": (WITH, "s"), "exact": (THIRD, "^"), "frobenius": ("#009e73", "D"),
    "large-positions": ("#b4568f", "v"), "scale-only": ("#c98500", "P"),
}  # fmt: skip


def cloud() -> Any:
    """Two features: what the correction does to a cloud of tokens."""
    x = torch.randn(160, 2, generator=torch.Generator().manual_seed(0)) @ torch.tensor(
        [[2.0, 1.6], [0.0, 0.12]]
    )
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.4), sharex=True, sharey=True)
    pictures = ((x, WITHOUT, "X"), (wc.conditioned_tokens(x), WITH, "X + C"))
    for axis, (tokens, colour, name) in zip(axes, pictures, strict=True):
        axis.scatter(*tokens.T, s=9, color=colour, alpha=0.75, linewidths=0)
        axis.set_title(f"{name}    κ = {wc.condition_number(tokens):.1f}")
        axis.set_aspect("equal")
        axis.set_xlabel("feature 1")
    axes[0].set_ylabel("feature 2")
    return figure


def photograph_tokens() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224").eval()
    images = load_images(model, None, 1)
    tokens, _ = tokens_and_inputs(model, model.get_submodule("blocks.0.attn"), images)
    return model, tokens[0]


def spectrum() -> Any:
    """Singular values of one photograph's tokens in a ViT-B/16."""
    _, x = photograph_tokens()
    y = wc.conditioned_tokens(x)
    figure, axis = plt.subplots(figsize=(7.0, 3.4))
    for tokens, colour, name in ((x, WITHOUT, "X"), (y, WITH, "X + C")):
        sigma = torch.linalg.svdvals(tokens.double())
        axis.semilogy(range(1, len(sigma) + 1), sigma, color=colour, lw=2)
        label = f"{name}: κ = {wc.condition_number(tokens):.3g}"
        axis.annotate(label, (len(sigma) * 0.55, sigma[len(sigma) // 2] * 1.25), color=colour, va="bottom")
    axis.set_xlabel("singular value, largest first")
    axis.set_title("Singular values of 197 tokens with 768 features", loc="left")
    return figure


def similarity() -> Any:
    """Cosine similarity between the tokens of one photograph."""
    _, x = photograph_tokens()
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.6), layout="constrained")
    for axis, tokens, name in ((axes[0], x, "X"), (axes[1], wc.conditioned_tokens(x), "X + C")):
        directions = torch.nn.functional.normalize(tokens, dim=-1)
        shown = axis.imshow(
            directions @ directions.mT, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest"
        )
        axis.set_title(f"{name}    κ = {wc.condition_number(tokens):.3g}")
        axis.set_xlabel("token")
    axes[0].set_ylabel("token")
    figure.colorbar(shown, ax=axes, label="cosine", shrink=0.85)
    return figure


def layers() -> Any:
    """κ of attention, layer by layer."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224").eval()
    images = load_images(model, None, 2)
    figure, axis = plt.subplots(figsize=(7.0, 3.4))
    for name, colour in (("without", WITHOUT), ("with conditioned tokens", WITH)):
        if colour == WITH:
            wc.condition_(model)
        rows = [row for row in wc.measure(model, images, weights=False) if row.site == "attention.output"]
        depth = 1 + max(row.layer for row in rows if row.layer is not None)
        means = [np.mean([row.kappa for row in rows if row.layer == layer]) for layer in range(depth)]
        axis.semilogy(range(1, depth + 1), means, "o-", color=colour, lw=2, ms=5)
        axis.annotate(name, (1, means[0] * 1.35), color=colour, va="bottom")
    axis.set_xlabel("layer")
    axis.set_title(
        "κ of self-attention, mean over heads and two photographs, ViT-S/16, random weights", loc="left"
    )
    return figure


def scopes() -> Any:
    """Which token's correction depends on which token."""
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.9), layout="constrained")
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    for axis, scope in zip(axes, ("sample", "table", "static"), strict=True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        ).eval()
        wc.condition_(model, wc.ConditioningConfig(scope=scope, allow_leak=scope == "sample"))
        if scope == "static":
            wc.calibrate_(model, [ids])
        seen: list[torch.Tensor] = []
        handle = model.transformer.drop.register_forward_hook(
            lambda module, args, output, to=seen: to.append(output)
        )
        moved = torch.zeros(12, 12)
        with torch.no_grad():
            model(ids)
            for j in range(12):
                other = ids.clone()
                other[0, j] = (other[0, j] + 1) % 64
                model(other)
                moved[:, j] = (seen[-1] - seen[0])[0].norm(dim=-1)
        handle.remove()
        axis.imshow(moved > 1e-6 * moved.max(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
        axis.set_title(scope)
        axis.set_xticks([0, 5, 10])
        axis.set_yticks([0, 5, 10])
        axis.set_xlabel("token changed")
    axes[0].set_ylabel("token that moves")
    return figure


def strength() -> Any:
    """The fixed correction against its bound."""
    _, x = photograph_tokens()
    strengths = np.geomspace(0.1, 10, 41)
    cases = [fixed_correction(x, s) for s in strengths]
    figure, axis = plt.subplots(figsize=(7.0, 3.4))
    axis.loglog(strengths, [case.left for case in cases], color=WITH, lw=2)
    axis.loglog(
        strengths,
        [case.right if math.isfinite(case.right) else np.nan for case in cases],
        "--",
        color=THIRD,
        lw=2,
    )
    axis.annotate("κ(X + λQ), measured", (0.12, cases[0].left * 1.1), color=WITH, va="bottom")
    axis.annotate("bound by Weyl's inequality", (1.35, 8), color=THIRD)
    axis.axhline(2, color=WITHOUT, lw=1, ls=":")
    axis.annotate("2", (9, 2.1), color=WITHOUT)
    axis.set_xlabel("strength λ/σ₁")
    axis.set_title("The fixed correction, one photograph", loc="left")
    return figure


def tangent_kernel() -> Any:
    """κ of tokens against κ of the tangent kernel, from the record."""
    path = HERE.parent / "records" / "2026-12-01-ntk" / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.6), sharey=True, layout="constrained")
    for axis, step in zip(axes, (0, 300), strict=True):
        for arm, (colour, marker) in CONTROLS.items():
            points = [(r["tokens"], r["kernel"]) for r in rows if r["arm"] == arm and r["step"] == step]
            axis.scatter(
                *zip(*points, strict=True), color=colour, marker=marker, s=26, label=arm, linewidths=0
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("κ of the tokens")
        axis.set_title("at the start" if step == 0 else f"after {step} steps")
    axes[0].set_ylabel("κ of the tangent kernel")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def leak() -> Any:
    """What a decoder that sees the future owes to it, from the record."""
    return prefix_figure(prefix_lines(read_run(HERE.parent / "records" / "2026-12-01-leak")))


def detections() -> Any:
    """What each arm of a detector finds on a test image, from the record."""
    run = read_run(HERE.parent / "records" / "2026-12-01-maskrcnn-digits")
    examples = read_examples(run.path / "examples.json", [arm.name for arm in run.arms])
    return detections_figure({arm: images[0] for arm, images in examples.items()}, run.baseline.name, LIGHT)


PICTURES: tuple[Callable[[], Any], ...] = (
    cloud, spectrum, similarity, layers, scopes, strength, tangent_kernel, leak, detections,
)  # fmt: skip


def main() -> None:
    matplotlib.use("svg")
    plt.rcParams |= {
        "svg.hashsalt": "wellcond", "font.size": 11.5, "axes.titlesize": 11.5, "axes.spines.top": False,
        "axes.spines.right": False, "figure.constrained_layout.use": True,
    }  # fmt: skip
    for picture in PICTURES:
        figure = picture()
        path = HERE / "pictures" / f"{picture.__name__.replace('_', '-')}.svg"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
