# # Condition your own model in your own loop
#
# A timm vision transformer, scikit-learn's digits, and a training loop of twenty lines. The model is trained twice,
# plain and conditioned, from the same weights and on the same batches, and κ is measured on the way.
#
#     python examples/condition_your_model.py --steps 200
#
# On a CPU core this takes about half a minute.

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import wellcond as wc

# ## Data
#
# 1,797 images of 8×8 pixels; the last 397 are kept for testing.


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    return images, torch.tensor(digits.target)[order]


# ## Your loop
#
# Nothing in it knows of conditioning. The monitor measures on fixed images, in a forward of its own; take it out and
# the training is the same to the bit.


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> float:
    monitor = wc.ConditioningMonitor(model, every=max(steps // 4, 1), batch=images[:8], weights=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    draw = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps + 1):
        for row in monitor.after_step(step):
            if row.site in ("tokens", "conditioned.before"):
                print(f"  step {step:4d}  {row.site:<18} κ = {row.kappa:.1f}")
        batch = torch.randint(1400, (64,), generator=draw)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return (model(images[1400:]).argmax(-1) == labels[1400:]).float().mean().item()


# ## Twice, from the same weights
#
# `condition_` goes before the optimizer and after nothing in particular: it adds no parameters. One pair of runs is an
# illustration, not a result. For a result you need several seeds and controls: `wellcond compare`.


def main(steps: int) -> dict[str, float]:
    images, labels = data()
    torch.manual_seed(0)
    plain = VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
    )
    conditioned = copy.deepcopy(plain)
    wc.condition_(conditioned)

    accuracy = {}
    for name, model in (("plain", plain), ("conditioned", conditioned)):
        print(name)
        accuracy[name] = train(model, images, labels, steps)
        print(f"  accuracy {100 * accuracy[name]:.1f} %")

    # ## Afterwards
    #
    # The state-dict keys are the ones of the plain model, so the checkpoint loads anywhere. But the weights were
    # trained *with* the correction: whoever loads them must attach it again. `save_config` and `restore_` remember.

    assert conditioned.state_dict().keys() == plain.state_dict().keys()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Condition your own timm model in your own loop")
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
