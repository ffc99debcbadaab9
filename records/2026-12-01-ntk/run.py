"""κ of the tangent kernel of a small ViT on digits, with and without conditioning. See README.md."""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import wellcond as wc
from wellcond.attach import attach_
from wellcond.monitor.sinks import append_lines, read_lines
from wellcond.theory import tangent_kernel
from wellcond.tokens import frobenius_ratio

RESULTS = Path(__file__).parent / "results.jsonl"
ARMS = ("baseline", "constant", "exact", "frobenius", "large-positions", "scale-only")
SEEDS = range(1, 9)
STEPS = (0, 30, 100, 300)


class ScaleOnly(nn.Module):
    """The norm of X + C without its directions: a control."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        ratio = frobenius_ratio(wc.conditioned_tokens(x.detach(), mask), x.detach(), mask)
        return x * ratio[..., None, None].to(x.dtype)


def build(arm: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=32,
        depth=3,
        num_heads=4,
        mlp_ratio=2.0,
    )
    if arm in ("constant", "exact"):
        wc.condition_(model, wc.ConditioningConfig(gradient=arm))
    elif arm == "frobenius":
        wc.condition_(model, wc.ConditioningConfig(rescale="frobenius"))
    elif arm == "large-positions":
        nn.init.normal_(model.pos_embed, std=1.0)
    elif arm == "scale-only":
        attach_(model, ScaleOnly(), None, "input")
    return model


def kappas(model: nn.Module, x: Tensor) -> dict[str, float]:
    exact_copy = copy.deepcopy(model).double().eval()
    kernel = tangent_kernel(exact_copy, x.double())
    n = len(x)
    traced = kernel.reshape(n, -1, n, kernel.shape[0] // n).diagonal(dim1=1, dim2=3).sum(-1)
    tokens = {row.site: row.kappa for row in wc.measure(exact_copy, x.double(), weights=False)}
    return {
        "kernel": wc.condition_number(kernel).item(),
        "kernel_traced": wc.condition_number(traced).item(),
        "tokens": tokens.get("conditioned.after", tokens["tokens"]),
    }


def one_run(arm: str, seed: int, images: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    model = build(arm, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    draw = torch.Generator().manual_seed(seed)
    train = torch.arange(1400)
    records, loss = [], math.nan
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            model.eval()
            with torch.no_grad():
                accuracy = (model(images[1400:]).argmax(-1) == labels[1400:]).double().mean().item()
            fields = {"arm": arm, "seed": seed, "step": step, "accuracy": accuracy, "loss": loss}
            records.append(fields | kappas(model, images[:32]))
            model.train()
        batch = train[torch.randint(len(train), (64,), generator=draw)]
        value = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        loss = value.item()
    return records


def interval(values: list[float]) -> str:
    mean, half = np.mean(values), stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def summary() -> None:
    rows = read_lines(RESULTS)
    value = {(r["arm"], r["seed"], r["step"]): r for r in rows}
    seeds = sorted({r["seed"] for r in rows})

    def logs(arm: str, step: int, name: str = "kernel") -> list[float]:
        return [math.log10(value[arm, seed, step][name]) for seed in seeds]

    print("| arm | step | κ(tokens) | κ(Θ) | log₁₀ κ(Θ) minus baseline | κ(traced Θ) | accuracy |")
    print("|---|---|---|---|---|---|---|")
    for arm in ARMS:
        for step in STEPS:
            means = [10 ** np.mean(logs(arm, step, name)) for name in ("tokens", "kernel", "kernel_traced")]
            accuracy = 100 * np.mean([value[arm, seed, step]["accuracy"] for seed in seeds])
            paired = [a - b for a, b in zip(logs(arm, step), logs("baseline", step), strict=True)]
            versus = "" if arm == "baseline" else interval(paired)
            print(
                f"| {arm} | {step} | {means[0]:.3g} | {means[1]:.2g} | {versus} | {means[2]:.2g} | {accuracy:.1f} % |"
            )
    for step in STEPS:
        tokens = [x for arm in ARMS for x in logs(arm, step, "tokens")]
        kernel = [x for arm in ARMS for x in logs(arm, step)]
        rho = stats.spearmanr(tokens, kernel).statistic
        apart = [
            f"{a} − {b} {interval([x - y for x, y in zip(logs(a, step), logs(b, step), strict=True)])}"
            for a, b in (("large-positions", "constant"), ("exact", "constant"))
        ]
        print(f"- step {step}: ρ = {rho:.2f} over {len(tokens)}; {'; '.join(apart)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", action="store_true", help="only print the tables of results.jsonl")
    if not parser.parse_args().summary:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
        labels = torch.tensor(digits.target)[order]
        RESULTS.unlink(missing_ok=True)
        for seed in SEEDS:
            for arm in ARMS:
                append_lines(RESULTS, one_run(arm, seed, images, labels))
    summary()


if __name__ == "__main__":
    main()
