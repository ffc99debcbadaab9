"""The token shapes of the paper's models, and matrices of those shapes with known singular values."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["1e2", "1e4", "1e6", "rank"]
KINDS: tuple[Kind, ...] = ("1e2", "1e4", "1e6", "rank")
"""κ of the matrix; ``rank``: 49 of every 128 directions (Swin's patches), κ⁺ = 1e3."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens batch×n×d of a model; ``model`` names it in `wellcond.bench.models`, None: no model belongs to it.

    ``samples`` are those of its forward and backward, None: the batch.
    """

    name: str
    batch: int
    n: int
    d: int
    model: str | None = None
    share: float = 0.01
    samples: int | None = None

    def quick(self) -> Shape:
        """A quarter of the batch, a 32nd of a table's rows: work is linear in both."""
        rows = self.n // 32 if self.batch == 1 else self.n
        return dataclasses.replace(self, batch=max(min(self.batch, 2), self.batch // 4), n=rows)

    @property
    def label(self) -> str:
        return f"{self.name} {self.batch}×{self.n}×{self.d}"


SHAPES = (
    Shape("ViT-B", 64, 196, 768, "vit_base_patch16_224"),
    Shape("DeiT-B", 64, 198, 768, "deit_base_distilled_patch16_224"),
    Shape("Swin-B", 16, 3136, 128, "swin_base_patch4_window7_224"),
    Shape("DaViT-B", 16, 3136, 128, "davit_base"),
    Shape("XCiT-M", 64, 196, 512, "xcit_medium_24_p16_224"),
    Shape("BERT", 64, 128, 768, "crammed-bert"),
    Shape("GPT-2 sequence", 4, 1024, 768),
    Shape("GPT-2 table", 1, 50257, 768, "gpt2", samples=16),  # the micro batch of gpt2-tinystories
    Shape("LRA", 16, 4096, 64, "nystromformer", share=0.03),
    Shape("detection", 2, 4165, 384),
)


def rank_of(shape: Shape, kind: Kind) -> int:
    """The rank of `matrices`."""
    small = min(shape.n, shape.d)
    return max(1, small * 49 // 128) if kind == "rank" else small


def matrices(shape: Shape, kinds: tuple[Kind, ...], device: str = "cpu") -> dict[Kind, Tensor]:
    """float32 tokens with logarithmically spaced singular values, two of them at least drawn anew per batch."""
    generator = torch.Generator().manual_seed(shape.n * shape.d)
    small, distinct = min(shape.n, shape.d), min(shape.batch, 2)
    left = torch.randn(distinct, shape.n, small, generator=generator, dtype=torch.float64)
    right = torch.randn(distinct, shape.d, small, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
    found = {}
    for kind in kinds:
        rank = rank_of(shape, kind)
        sigma = torch.logspace(0, -3.0 if kind == "rank" else -float(kind[-1]), rank, dtype=torch.float64)
        x = ((left[..., :rank] * sigma) @ right[..., :rank].mT).float()
        repeats = -(-shape.batch // distinct)
        found[kind] = x.repeat(repeats, 1, 1)[: shape.batch].contiguous().to(device)
    return found
