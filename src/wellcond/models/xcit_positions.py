"""XCiT's positions over each image's own size, where a detector pads images to that of the largest in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class OwnPositions(nn.Module):
    """The sine and cosine encoding of timm's XCiT, from 0 to 2π over every image's own height and width.

    timm's, as that of XCiT's own detectors, goes over the padded batch: a position then depends on how large the other
    images are. That is felt by the plain model, and more by a conditioned one, since the correction lifts the weak
    directions of the tokens, to which the positions of an image contribute most. For an image without padding both
    are the same, so that pretrained weights fit. Padding continues with the last position, as in DETR, where the
    encoding comes from.

    Args:
        embed: timm's module; its projection is taken over, under the same name.
        patch: pixels per token.

    Source: https://github.com/facebookresearch/detr, models/position_encoding.py, which counts real pixels only.
    """

    def __init__(self, embed: nn.Module, patch: int) -> None:
        super().__init__()
        module: Any = embed
        self.token_projection = module.token_projection
        self.hidden_dim, self.temperature = int(module.hidden_dim), float(module.temperature)
        self.scale, self.eps = float(module.scale), float(module.eps)
        self.patch = patch
        self.sizes: Sequence[tuple[int, int]] | None = None

    def forward(self, batch: int, height: int, width: int) -> Tensor:
        """Encodings ``(B, C, H, W)`` for so many tokens; sizes that were noted serve once.

        Raises ValueError if sizes were noted for another number of images or do not fit on the grid.
        """
        sizes, self.sizes = self.sizes, None
        noted = [(height, width)] * batch if sizes is None else [self._tokens(size) for size in sizes]
        if len(noted) != batch or any(h > height or w > width for h, w in noted):
            raise ValueError(
                f"images of {sizes} pixels are not the {batch} of {height}×{width} tokens at hand"
            )
        weight = self.token_projection.weight
        heights, widths = torch.tensor(noted, device=weight.device, dtype=torch.float32).unbind(1)
        rows, columns = (self._waves(n, total) for n, total in ((height, heights), (width, widths)))
        grid = torch.cat(
            [
                rows[:, :, None].expand(-1, -1, width, -1),
                columns[:, None].expand(-1, height, -1, -1),
            ],
            dim=-1,
        )
        encoding: Tensor = self.token_projection(grid.permute(0, 3, 1, 2).to(weight.dtype))
        return encoding

    def _tokens(self, size: tuple[int, int]) -> tuple[int, int]:
        return -(-size[0] // self.patch), -(-size[1] // self.patch)

    def _waves(self, count: int, totals: Tensor) -> Tensor:
        """Sines and cosines ``(B, count, hidden_dim)`` along one axis, of which ``totals`` (B,) places are real."""
        place = torch.arange(1, count + 1, device=totals.device, dtype=torch.float32)
        place = torch.minimum(place[None], totals[:, None]) / (totals[:, None] + self.eps) * self.scale
        channel = torch.arange(self.hidden_dim, device=totals.device)
        pair = channel.div(2, rounding_mode="floor")
        angle = place[..., None] / self.temperature ** (2 * pair / self.hidden_dim)
        return torch.stack([angle[..., 0::2].sin(), angle[..., 1::2].cos()], dim=-1).flatten(-2)


class NoteSizes:
    """A forward hook on a detector's ``transform``: tells the positions how large the images are before padding."""

    def __init__(self, positions: OwnPositions) -> None:
        self.positions = positions

    def __call__(self, module: nn.Module, args: Any, output: tuple[Any, Any]) -> None:
        self.positions.sizes = list(output[0].image_sizes)


def use_own_positions_(detector: nn.Module, body: nn.Module) -> None:
    """Let the XCiT ``body`` inside a torchvision detector count positions over each image's own size, in place.

    Raises TypeError if the body has no positions of XCiT's kind.
    """
    from timm.models.xcit import PositionalEncodingFourier, Xcit

    if not isinstance(body, Xcit) or not isinstance(body.pos_embed, PositionalEncodingFourier):
        raise TypeError(f"{type(body).__name__} has no positions of XCiT's kind")
    positions = OwnPositions(body.pos_embed, int(body.patch_embed.patch_size))
    body.register_module("pos_embed", positions)
    detector.get_submodule("transform").register_forward_hook(NoteSizes(positions))
