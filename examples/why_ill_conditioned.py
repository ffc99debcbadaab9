# # Find out why your attention is ill-conditioned
#
# Four questions, each with a few lines. The model here is an untrained ViT-S/16, the batch two photographs that
# scikit-learn ships; put your own model and batch in their place.
#
#     python examples/why_ill_conditioned.py

from __future__ import annotations

import argparse

import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import wellcond as wc


def photographs(model: nn.Module) -> Tensor:
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    return torch.stack([prepare(Image.fromarray(picture)) for picture in load_sample_images().images])


# ## 1. Where does it start?
#
# The first row of `measure` is what enters the first block. If κ is large there already, attention inherits it. The
# softmax matrices of an untrained model are nearly constant: then κ is infinite in float32, and their rank says more.


def where(rows: list[wc.Row]) -> None:
    tokens = rows[0]
    print(f"1. tokens: κ = {tokens.kappa:.3g}, κ⁺ = {tokens.kappa_pinv:.3g}, rank {tokens.rank}")
    for site in ("attention.output", "attention.weights"):
        depth = 1 + max(row.layer for row in rows if row.layer is not None)
        for layer in sorted({0, depth // 2, depth - 1}):
            heads = [row for row in rows if row.site == site and row.layer == layer]
            kappas, ranks = [row.kappa for row in heads], [row.rank for row in heads]
            print(
                f"   {site:<18} layer {layer:2d}: κ {min(kappas):.2g} to {max(kappas):.2g}, rank from {min(ranks)}"
            )


# ## 2. One strong direction, or many weak ones?
#
# κ = (σ₁/σ₂)·(σ₂/σ_min). A large first factor is one direction that all tokens share, such as brightness or a large
# bias; centring or a norm may already help. A large second factor is a long tail of directions that hardly exist.


def strong_or_weak(tokens: Tensor) -> tuple[float, float]:
    sigma = torch.linalg.svdvals(tokens.double())
    strong, weak = (sigma[:, 0] / sigma[:, 1]).mean().item(), (sigma[:, 1] / sigma[:, -1]).mean().item()
    print(f"2. strongest against second {strong:.3g}; second against weakest {weak:.3g}")
    return strong, weak


# ## 3. Are directions missing?
#
# A rank below min(N, d) means that tokens repeat, or that a token is made from fewer numbers than it has features.
# Then κ is infinite, κ⁺ is the number to look at, and `null_space` is the option to think about.


def missing(model: nn.Module, tokens: Tensor) -> tuple[int, int]:
    full = min(tokens.shape[-2:])
    rank = int(wc.spectrum(tokens).rank.min())
    constant = torch.full((1, *model.patch_embed.proj.weight.shape[1:2], *model.patch_embed.img_size), 0.5)
    with torch.no_grad():
        patches = model.patch_embed(constant)
    of_constant = int(wc.spectrum(patches).rank.min())
    print(f"3. rank {rank} of {full}; a constant image, before positions: rank {of_constant}")
    return rank, of_constant


# ## 4. Does the correction reach attention?
#
# The same measurement with the correction on. If κ of the heads falls with κ of the tokens, the tokens were the reason.
# If it does not, look at the weights, κ(W_Q), κ(W_K), κ(W_V), or at a softmax matrix that is nearly singular by itself.


def does_it_reach(model: nn.Module, images: Tensor, before: list[wc.Row]) -> tuple[float, float]:
    def first_layer(rows: list[wc.Row]) -> float:
        heads = [row.kappa for row in rows if row.site == "attention.output" and row.layer == 0]
        return sum(heads) / len(heads)

    with wc.condition_(model):
        after = wc.measure(model, images)
    print(f"4. first layer: κ = {first_layer(before):.3g}, conditioned {first_layer(after):.3g}")
    for name, weight in (("W_Q", 0), ("W_K", 1), ("W_V", 2)):
        heads = (
            model.blocks[0]
            .attn.qkv.weight.chunk(3)[weight]
            .unflatten(0, (model.blocks[0].attn.num_heads, -1))
        )
        print(f"   κ({name}) of the first layer's heads: {wc.condition_number(heads.detach()).mean():.3g}")
    return first_layer(before), first_layer(after)


def main(name: str) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    images = photographs(model)
    rows = wc.measure(model, images)
    where(rows)

    caught: list[Tensor] = []
    handle = model.norm_pre.register_forward_hook(lambda module, args, output: caught.append(output))
    with torch.no_grad():
        model(images)
    handle.remove()
    return {
        "directions": strong_or_weak(caught[0]),
        "rank": missing(model, caught[0]),
        "reach": does_it_reach(model, images, rows),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find out why your attention is ill-conditioned")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm vision transformer")
    main(parser.parse_args().model)
