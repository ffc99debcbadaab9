"""Feature maps at four strides from a transformer of any stride, for detection: XCiT's recipe on timm's models."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn


class TokenPyramid(nn.Module):
    """A timm transformer and a feature pyramid over four of its blocks: the backbone of a torchvision detector.

    A plain transformer has one stride throughout. As in XCiT's detectors, each chosen block is brought to its own
    stride: transposed convolutions make it finer, max-pooling coarser. Blocks that have their stride already, as
    those of hierarchical models, are left alone. A `FeaturePyramidNetwork` follows, and a fifth level by striding.

    Parts of the transformer that no feature map depends on, such as the classifier and XCiT's class attention, are
    removed: a parameter without a gradient stops training on several devices.

    Args:
        body: a timm model with ``forward_intermediates`` that takes images of any size.
        blocks: indices of blocks, or of stages where the model has those, one for each stride, in order.
        strides: of the feature maps in pixels, fine to coarse; each is a power of two times the block's.
        channels: of every feature map.

    Raises:
        TypeError: the model has no ``forward_intermediates``.
        ValueError: blocks and strides do not fit each other or the model; the message says how.

    Source: https://github.com/facebookresearch/xcit, detection/backbone/xcit.py, ``fpn1`` to ``fpn4``.

    >>> import timm, torch
    >>> body = timm.create_model("xcit_nano_12_p16_224", depth=4, embed_dim=32, num_heads=2)
    >>> pyramid = TokenPyramid(body, blocks=(0, 1, 2, 3), channels=16)
    >>> {name: tuple(x.shape[1:]) for name, x in pyramid(torch.rand(1, 3, 64, 96)).items()}
    {'0': (16, 16, 24), '1': (16, 8, 12), '2': (16, 4, 6), '3': (16, 2, 3), 'pool': (16, 1, 2)}
    """

    def __init__(
        self,
        body: nn.Module,
        blocks: Sequence[int],
        strides: Sequence[int] = (4, 8, 16, 32),
        channels: int = 256,
    ) -> None:
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

        super().__init__()
        name = type(body).__name__
        for needed in ("forward_intermediates", "prune_intermediate_layers"):
            if not hasattr(body, needed):
                raise TypeError(f"{name} has no {needed}: take a model of timm that returns feature maps")
        levels = [_level(body, block) for block in blocks]
        if len(blocks) != len(strides) or sorted(set(blocks)) != list(blocks):
            raise ValueError(
                f"blocks {tuple(blocks)} and strides {tuple(strides)} must be as many, and the blocks in order"
            )
        if sorted(set(strides)) != list(strides):
            raise ValueError(f"strides go from fine to coarse, got {tuple(strides)}")
        self.blocks = list(blocks)
        self.strides = tuple(strides)
        self.out_channels = channels
        self.body = body
        body.prune_intermediate_layers(self.blocks, prune_norm=True, prune_head=True)  # type: ignore[operator]
        self.resample = nn.ModuleList(
            resampling(width, stride, wanted) for (width, stride), wanted in zip(levels, strides, strict=True)
        )
        self.fpn = FeaturePyramidNetwork(
            [width for width, _ in levels], channels, extra_blocks=LastLevelMaxPool()
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps ``(B, channels, H/stride, W/stride)`` of images ``(B, C, H, W)``, "0" the finest, and "pool".

        Raises ValueError if the images are not whole multiples of the coarsest stride: maps would not fit together.
        """
        edge = self.strides[-1]
        if images.shape[-2] % edge or images.shape[-1] % edge:
            raise ValueError(
                f"images of {images.shape[-2]}×{images.shape[-1]} pixels are no multiples of the stride {edge}; "
                f"pad them (size_divisible of torchvision's detectors)"
            )
        maps = self.body.forward_intermediates(  # type: ignore[operator]
            images, indices=self.blocks, intermediates_only=True
        )
        resampled = {str(i): change(x) for i, (change, x) in enumerate(zip(self.resample, maps, strict=True))}
        features: dict[str, Tensor] = self.fpn(resampled)
        return features


def resampling(width: int, stride: int, wanted: int) -> nn.Module:
    """From feature maps ``(B, width, H, W)`` of one stride to another: the layers of XCiT's detectors.

    Raises ValueError where one stride is not a power of two times the other.

    >>> import torch
    >>> [tuple(resampling(8, 16, s)(torch.rand(2, 8, 6, 4)).shape) for s in (4, 8, 16, 32)]
    [(2, 8, 24, 16), (2, 8, 12, 8), (2, 8, 6, 4), (2, 8, 3, 2)]
    """
    factor = math.log2(wanted / stride)
    if factor != round(factor):
        raise ValueError(f"stride {wanted} is no power of two times the block's stride {stride}")
    if factor > 0:
        return nn.MaxPool2d(wanted // stride)
    layers: list[nn.Module] = []
    for _ in range(round(-factor)):
        if layers:
            layers += [nn.BatchNorm2d(width), nn.GELU()]
        layers.append(nn.ConvTranspose2d(width, width, kernel_size=2, stride=2))
    return nn.Sequential(*layers) if layers else nn.Identity()


def _level(body: Any, block: int) -> tuple[int, int]:
    """Channels and stride of a block's feature map, as timm's ``feature_info`` has them."""
    info = list(body.feature_info)
    if not 0 <= block < len(info):
        raise ValueError(f"there is no block {block}: {type(body).__name__} has {len(info)}, from 0")
    return int(info[block]["num_chs"]), int(info[block]["reduction"])


def xcit_body(name: str, *, weights: str | os.PathLike[str] | None = None, **options: Any) -> nn.Module:
    """A timm model, with weights from a local file or fresh.

    Args:
        name: as timm has it, such as ``"xcit_small_12_p16_224"``.
        weights: a file of ImageNet weights, ``.pth`` of XCiT's authors or of timm, or ``.safetensors``. Keys are
            translated by timm and every one must be there. Nothing is downloaded.
        options: further arguments of `timm.create_model`, such as ``drop_path_rate``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, or its weights are those of another model; the message names the file and
            what does not fit.
    """
    import timm

    if weights is None:
        model: nn.Module = timm.create_model(name, **options)
        return model
    path = weights_file(weights)
    try:
        # An overlay with a file takes precedence over every address that timm knows.
        model = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, **options
        )
    except Exception as error:  # of torch, pickle or safetensors, whatever is wrong with a file
        raise ValueError(f"{path} has no weights that fit {name}: {_shortened(error)}") from error
    return model


def weights_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is there; FileNotFoundError otherwise."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of weights {path}")
    return Path(path)


def _shortened(error: Exception) -> str:
    """The first lines of a message, which may list hundreds of keys."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return " ".join(line if len(line) <= 160 else f"{line[:160]} ..." for line in lines[:4])
