"""How tight the paper's statements are: two untrained ViTs on photographs, and small ones before and after training."""

from __future__ import annotations

import statistics

import timm
import torch
from torch.nn import functional as F

import wellcond as wc
from wellcond.data import digits
from wellcond.recipes.digits import small_vit
from wellcond.theory import Tightness, on_model
from wellcond.theory.on_model import load_images

SEEDS = range(5)


def table(title: str, runs: list[list[Tightness]]) -> None:
    """Medians over runs; counts are summed."""
    print(f"\n### {title}\n")
    print("| statement | left | right | right/left | covered | true | beyond float64 |")
    print("|---|---|---|---|---|---|---|")
    for lines in zip(*runs, strict=True):
        left, right, slack = (
            statistics.median(getattr(x, key) for x in lines) for key in ("left", "right", "slack")
        )
        cases, applies, holds, undecided = (
            sum(getattr(x, key) for x in lines) for key in ("cases", "applies", "holds", "undecided")
        )
        numbers = f"{left:.3g} | {right:.3g} | {slack:.3g}"
        print(f"| {lines[0].name} | {numbers} | {applies}/{cases} | {holds}/{cases} | {undecided} |")


def trained(seed: int, conditioned: bool) -> tuple[list[Tightness], list[Tightness], float]:
    """The digits ViT before and after 300 steps, and its accuracy."""
    data = digits()
    torch.manual_seed(seed)
    model = small_vit()
    probe = data.test.pixels[:4]
    before = on_model(model, probe)
    if conditioned:
        wc.condition_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    draw = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(300):
        batch = torch.randint(len(data.train), (64,), generator=draw)
        loss = F.cross_entropy(model(data.train.pixels[batch]), data.train.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(data.test.pixels).argmax(-1) == data.test.labels).double().mean().item()
    wc.remove_(model)
    return before, on_model(model, probe), accuracy


def main() -> None:
    for name in ("vit_small_patch16_224", "vit_base_patch16_224"):
        torch.manual_seed(0)
        model = timm.create_model(name).eval()
        table(f"{name}, untrained, two photographs", [on_model(model, load_images(model, None, 2))])
    plain = [trained(seed, conditioned=False) for seed in SEEDS]
    table("digits-vit, untrained, 4 digits, 5 seeds", [before for before, _, _ in plain])
    accuracy = 100 * statistics.fmean(value for *_, value in plain)
    table(f"digits-vit, trained plain ({accuracy:.1f} %)", [after for _, after, _ in plain])
    conditioned = [trained(seed, conditioned=True) for seed in SEEDS]
    accuracy = 100 * statistics.fmean(value for *_, value in conditioned)
    table(f"digits-vit, trained conditioned ({accuracy:.1f} %)", [after for _, after, _ in conditioned])


if __name__ == "__main__":
    main()
