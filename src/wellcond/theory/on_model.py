"""How tight the statements are on a real model and real images: `wellcond theory MODEL --data ...`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attach import condition_, find_known, place_of
from wellcond.config import ConditioningConfig
from wellcond.monitor import Row, measure
from wellcond.theory.statements import (
    Statement,
    compare,
    conditioned_attention,
    conditioned_bound,
    conditioning,
    fixed_correction,
    linear_attention,
    softmax_attention,
    split_heads,
    values_attention,
)

STRENGTH = 3.0
"""λ/σ₁ at which the fixed correction's bound is 2 for a semi-orthogonal code."""


@dataclasses.dataclass(frozen=True)
class Tightness:
    """One statement over all heads and samples of a layer.

    Attributes:
        name, source: see `Statement`.
        cases: how many heads × samples; of them ``applies`` are covered, ``holds`` true, ``undecided`` beyond
            what float64 resolves.
        left, right, slack: medians over cases.
        reason: why the first case is covered or not.
    """

    name: str
    source: str
    cases: int
    applies: int
    holds: int
    undecided: int
    left: float
    right: float
    slack: float
    reason: str


def on_model(model: nn.Module, images: Tensor, *, layer: int = 0) -> list[Tightness]:
    """Every statement on the weights of one attention layer of a timm ViT and on the tokens of real images.

    Theorem 4.4 and the fixed correction are evaluated on what enters the first block. Where a statement says
    A(X), X is what the attention of ``layer`` receives, which in these models has passed a LayerNorm; a bias
    b of the projections is part of the weights, ``[X 1][W; bᵀ]``. The scale 1/√d_k is part of W_Q. The comparisons
    of before and after come twice: A(X+C) as in the paper, and A(LN(X+C)) as the conditioned model computes it,
    the correction before its norm.

    Args:
        model: a timm vision transformer (ViT, DeiT, ...), not conditioned.
        images: ``(B, 3, H, W)``, preprocessed.
        layer: which block, from 0.

    Raises:
        ValueError: the model is no such transformer, or has no such layer.
    """
    attention = attention_layer(model, layer)
    tokens, inputs = tokens_and_inputs(model, attention, images)
    with condition_(model):
        _, through_norm = tokens_and_inputs(model, attention, images)
    cases: list[Statement] = []
    for x in tokens:
        cases += [conditioning(x), fixed_correction(x, STRENGTH)]
    for x, conditioned in zip(inputs, through_norm, strict=True):
        normed = heads_of(attention, conditioned)
        for (a, w_q, w_k, w_v), (y, *_) in zip(heads_of(attention, x), normed, strict=True):
            cases += [
                linear_attention(a, w_q, w_k, w_v),
                softmax_attention(a, w_q, w_k, w_v),
                values_attention(a, w_q, w_k, w_v),
            ]
            for check in (conditioned_bound, conditioned_attention):
                literal, real = check(a, w_q, w_k, w_v), check(a, w_q, w_k, w_v, conditioned=y)
                cases += [literal, dataclasses.replace(real, name=real.name.replace("A(X+C)", "A(LN(X+C))"))]
    groups: dict[str, list[Statement]] = {}
    for case in cases:
        groups.setdefault(case.name, []).append(case)
    return [summary(group) for group in groups.values()]


def propagation(model: nn.Module, batch: Any, config: ConditioningConfig | None = None) -> list[Statement]:
    """κ of every self-attention layer with conditioning (left) and without (right), by experiment.

    The paper's remark: the guarantee is for the first layer, later layers improve empirically. Nothing here
    applies in the sense of a theorem, so ``applies`` is False throughout. The numbers are κ of each head's
    output, averaged over heads and samples as in the paper's figures.

    Args:
        model: any model that `wellcond.measure` knows, not conditioned; left as it was.
        batch: what it is called with.
        config: how to condition.

    Raises:
        ValueError: see `wellcond.condition_` and `wellcond.measure`.

    >>> from torch import nn, randn
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    >>> [s.name for s in propagation(encoder, randn(2, 5, 8))]
    ['κ of layer 0', 'κ of layer 1']
    """
    without = kappa_of_layers(measure(model, batch, weights=False))
    with condition_(model, config):
        conditioned = kappa_of_layers(measure(model, batch, weights=False))
    return [
        compare(
            f"κ of layer {layer}",
            "remark",
            conditioned[layer],
            without[layer],
            False,
            "observed, not promised: no statement reaches through norms, MLPs and residuals",
            1,
        )
        for layer in without
    ]


def kappa_of_layers(rows: list[Row]) -> dict[int, float]:
    """κ of the attention output by layer, averaged over heads."""
    by_layer: dict[int, list[float]] = {}
    for row in rows:
        if row.site == "attention.output" and row.layer is not None:
            by_layer.setdefault(row.layer, []).append(row.kappa)
    return {layer: statistics.fmean(values) for layer, values in by_layer.items()}


def run(
    model: str,
    data: Path | None = None,
    *,
    pretrained: bool = False,
    samples: int = 2,
    layer: int = 0,
    seed: int = 0,
) -> list[Tightness]:
    """Print how tight each bound is on the timm model named ``model``, and κ of every layer; return the table.

    Args:
        model: timm name of a vision transformer, such as ``vit_base_patch16_224``.
        data: an image or a folder of images; None: the two photographs that scikit-learn ships.
        pretrained: load timm's weights; otherwise random weights from ``seed``.
        samples: how many images.
        layer: the attention layer to look at.

    Raises:
        ValueError: no such model, too few images, or as `on_model`.
        FileNotFoundError: ``data`` does not exist.
    """
    import timm

    torch.manual_seed(seed)
    try:
        network = timm.create_model(model, pretrained=pretrained).eval()
    except RuntimeError as error:
        raise ValueError(
            f"timm cannot build {model!r}: {error}; timm.list_models() knows the names"
        ) from error
    images = load_images(network, data, samples)
    weights = "pretrained" if pretrained else f"random weights, seed {seed}"
    table = on_model(network, images, layer=layer)
    layers = propagation(network, images)

    print(
        f"{model} ({weights}), {len(images)} images, attention layer {layer}; medians over heads and images"
    )
    print(f"{'statement':<46} {'left':>10} {'right':>10} {'right/left':>10}  covered  true")
    for line in table:
        undecided = f" ({line.undecided} beyond float64)" if line.undecided else ""
        print(
            f"{line.name:<46} {line.left:>10.4g} {line.right:>10.4g} {line.slack:>10.3g}"
            f"  {line.applies:>3}/{line.cases:<3}  {line.holds}/{line.cases}{undecided}"
        )
        print(f"  {line.source}: {line.reason}")
    print("\nκ of the heads' outputs, averaged over heads and images: without and with conditioning")
    for s in layers:
        print(f"  {s.name:<14} {s.right:>10.4g} {s.left:>10.4g}")
    return table


# ------------------------------------------------------------------------------------------- reading the model


def attention_layer(model: nn.Module, layer: int) -> Any:
    """The attention module of block ``layer`` of a timm ViT."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no blocks: the theory is read from timm's vision transformers"
        )
    if not 0 <= layer < len(blocks):
        raise ValueError(f"layer {layer} is not one of the {len(blocks)} of this {type(model).__name__}")
    attention: Any = getattr(blocks[layer], "attn", None)
    plain = isinstance(getattr(attention, "qkv", None), nn.Linear) and all(
        isinstance(getattr(attention, name, nn.Identity()), nn.Identity)
        for name in ("q_norm", "k_norm", "norm")
    )
    if not plain:
        raise ValueError(
            f"the attention of block {layer}, {type(attention).__name__}, is not softmax(QKᵀ)V with one linear "
            f"qkv and no norms inside; the paper's statements are not about it"
        )
    return attention


@torch.no_grad()
def tokens_and_inputs(model: nn.Module, attention: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the first block and what ``attention`` receives, both ``(B, N, d)``, in eval mode."""
    place = place_of(find_known(model), "input")
    if place.side != "output" or place.key is not None:
        raise ValueError(f"the tokens of {type(model).__name__} are not the output of a module")
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(place.module).register_forward_hook(
            lambda module, args, output: seen.__setitem__("tokens", place.as_tokens(output))
        ),
        attention.register_forward_pre_hook(lambda module, args: seen.__setitem__("inputs", args[0])),
    ]
    training = model.training
    try:
        model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen["tokens"].detach(), seen["inputs"].detach()


def heads_of(attention: Any, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """X, W_Q, W_K, W_V of every head, float64; a bias joins as a column of ones in X and a row in W."""
    weight, bias = attention.qkv.weight.detach().double().mT, attention.qkv.bias
    x = x.double()
    if bias is not None and bool((bias != 0).any()):
        x = torch.cat([x, x.new_ones(len(x), 1)], -1)
        weight = torch.cat([weight, bias.detach().double()[None]])
    w_q, w_k, w_v = (split_heads(w, attention.num_heads) for w in weight.chunk(3, dim=-1))
    for q, k, v in zip(w_q, w_k, w_v, strict=True):
        yield x, q * attention.scale, k, v


def load_images(model: nn.Module, data: Path | None, samples: int) -> Tensor:
    """Images as the model's own preprocessing makes them, ``(samples, 3, H, W)``."""
    import timm.data
    from PIL import Image

    prepare: Any = timm.data
    transform = prepare.create_transform(**prepare.resolve_model_data_config(model), is_training=False)
    if data is None:
        from sklearn.datasets import load_sample_images

        pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    else:
        if not data.exists():
            raise FileNotFoundError(f"{data} does not exist; give an image or a folder of images")
        suffixes = set(Image.registered_extensions())
        paths = (
            sorted(p for p in data.rglob("*") if p.suffix.lower() in suffixes) if data.is_dir() else [data]
        )
        pictures = [Image.open(path).convert("RGB") for path in paths[:samples]]
    if samples < 1 or len(pictures) < samples:
        raise ValueError(f"{samples} images wanted, {len(pictures)} found in {data or 'scikit-learn'}")
    return torch.stack([transform(picture) for picture in pictures[:samples]])


def summary(cases: list[Statement]) -> Tightness:
    """Counts and medians of one statement over its cases."""
    slacks = [s.slack for s in cases if not math.isnan(s.slack)]
    return Tightness(
        name=cases[0].name,
        source=cases[0].source,
        cases=len(cases),
        applies=sum(s.applies for s in cases),
        holds=sum(s.holds is True for s in cases),
        undecided=sum(s.holds is None for s in cases),
        left=statistics.median(s.left for s in cases),
        right=statistics.median(s.right for s in cases),
        slack=statistics.median(slacks) if slacks else math.nan,
        reason=cases[0].reason,
    )
