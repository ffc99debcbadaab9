"""Masks for masked language modelling: some tokens are to be predicted, most of them are hidden."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from wellcond.data.wordpiece import CLASS, MASK, PAD, SEPARATOR

NOT_PREDICTED = -100
"""Label of a position that is not predicted, as everywhere in transformers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """BERT's rule: a share of the tokens is predicted; of those 80 % are hidden, 10 % replaced, 10 % left as they are.

    Source: Devlin et al., arXiv 1810.04805, section 3.1 (there a share of 15 %).

    Attributes:
        vocabulary: number of tokens; a replacement is any of them.
        share: of tokens to predict, each chosen on its own.
        hidden: of those, the share that becomes ``mask``.
        replaced: of those, the share that becomes a token drawn at random.
        mask: the id that hides a token.
        special: ids that are never chosen.

    Raises:
        ValueError: a share is outside 0 to 1, or hidden and replaced are more than all.
    """

    vocabulary: int
    share: float = 0.25
    hidden: float = 0.8
    replaced: float = 0.1
    mask: int = MASK
    special: tuple[int, ...] = (PAD, CLASS, SEPARATOR)

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.hidden >= 0 and self.replaced >= 0):
            raise ValueError(
                f"shares lie in 0 to 1, got {self.share}, hidden {self.hidden}, replaced {self.replaced}"
            )
        if self.hidden + self.replaced > 1 + 1e-9:
            raise ValueError(f"hidden {self.hidden} and replaced {self.replaced} are more than all")

    def apply(self, ids: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Changed tokens and labels of ``ids`` ``(..., N)`` int64; ``ids`` stays as it is.

        Where chance chooses no token of the whole batch, one is chosen, so that there is always something to predict.

        Args:
            ids: tokens.
            generator: of random numbers; None: torch's random state.

        Returns:
            Tokens ``(..., N)`` and labels ``(..., N)``: the original token, or −100 where nothing is predicted.

        Raises:
            ValueError: all tokens are special.

        >>> masking = Masking(vocabulary=100)
        >>> inputs, labels = masking.apply(torch.full((8, 64), 7), torch.Generator().manual_seed(0))
        >>> 0.2 < (labels == 7).float().mean().item() < 0.3, (inputs[labels == -100] == 7).all().item()
        (True, True)
        """
        allowed = torch.ones_like(ids, dtype=torch.bool)
        for token in self.special:
            allowed &= ids != token
        if not allowed.any():
            raise ValueError(f"all tokens of shape {tuple(ids.shape)} are special: there is nothing to hide")
        chosen = (torch.rand(ids.shape, generator=generator) < self.share) & allowed
        if not chosen.any():
            places = allowed.flatten().nonzero()[:, 0]
            chosen.view(-1)[places[torch.randint(len(places), (), generator=generator)]] = True
        fate = torch.rand(ids.shape, generator=generator)
        others = torch.randint(self.vocabulary, ids.shape, generator=generator)
        inputs = torch.where(chosen & (fate < self.hidden), self.mask, ids)
        swapped = chosen & (fate >= self.hidden) & (fate < self.hidden + self.replaced)
        return torch.where(swapped, others, inputs), torch.where(chosen, ids, NOT_PREDICTED)


class FixedMasks(Dataset[dict[str, Tensor]]):
    """Sequences with masks that depend on their place alone: every evaluation asks for the same tokens.

    Items: ``input_ids`` and ``labels``, ``(N,)`` int64 each.

    Args:
        sequences: items with ``input_ids`` ``(N,)``.
        masking: the rule.
        seed: of the masks.

    >>> from wellcond.data.wordpiece import Packed
    >>> masked = FixedMasks(Packed(torch.arange(10, 90).view(4, 20).numpy()), Masking(vocabulary=100))
    >>> all((masked[1][key] == masked[1][key]).all() for key in ("input_ids", "labels"))
    True
    """

    draws = False  # not from the running random state

    def __init__(self, sequences: Dataset[dict[str, Tensor]], masking: Masking, seed: int = 0) -> None:
        self.sequences = sequences
        self.masking = masking
        self.seed = seed

    def __len__(self) -> int:
        return len(self.sequences)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sequences[index]["input_ids"]
        # torch's generator takes 32 bits of a seed and no more: both numbers have to be mixed into them.
        word = int(np.random.SeedSequence([self.seed, index]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(word)
        inputs, labels = self.masking.apply(ids, generator)
        return {"input_ids": inputs, "labels": labels}
