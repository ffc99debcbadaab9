"""What a site is: the place in a model where the embedded tokens pass, and how to read them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from wellcond.linalg import choose

Layout = Literal["NLC", "LNC", "NHWC", "NCHW"]
Side = Literal["input", "output"]
MaskReader = Callable[[Mapping[str, Any]], Tensor | None]


@dataclasses.dataclass(frozen=True)
class Site:
    """One place where tokens pass.

    Attributes:
        module: dotted path of the submodule; ``""`` is the model itself.
        side: whether the tokens are what the module returns or what it receives.
        layout: axes of the tensor. N batch, L tokens, C features, H and W a grid of tokens. ``"NLC"`` takes
            any leading axes, ``(..., N, d)``.
        key: where the tokens are in a tuple (int), a mapping or keyword arguments (str); None: the value
            itself, or the first argument.
    """

    module: str
    side: Side = "output"
    layout: Layout = "NLC"
    key: int | str | None = None

    def __post_init__(self) -> None:
        choose("layout", self.layout, Layout)
        choose("side", self.side, Side)

    def below(self, prefix: str) -> Site:
        """The same site seen from a model that holds this one under ``prefix``."""
        path = ".".join(part for part in (prefix, self.module) if part)
        return dataclasses.replace(self, module=path)

    def as_tokens(self, tensor: Tensor) -> Tensor:
        """The tensor at the site as tokens ``(..., N, d)``."""
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"site {self.module!r} holds {type(tensor).__name__}, not a tensor; name the element with key="
            )
        wanted = {"NHWC": 4, "NCHW": 4}.get(self.layout)
        if (wanted and tensor.ndim != wanted) or tensor.ndim < 2:
            raise ValueError(
                f"site {self.module!r} is declared {self.layout} but holds shape {tuple(tensor.shape)}; "
                f"pass the layout that fits"
            )
        if self.layout == "NHWC":
            return tensor.flatten(1, 2)
        if self.layout == "NCHW":
            return tensor.flatten(2).mT
        if self.layout == "LNC" and tensor.ndim == 3:
            return tensor.transpose(0, 1)
        return tensor

    def as_tensor(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Tokens back in the layout, shape and dtype of the tensor they came from."""
        if self.layout == "NCHW":
            tokens = tokens.mT
        elif self.layout == "LNC" and like.ndim == 3:
            tokens = tokens.transpose(0, 1)
        return tokens.reshape(like.shape).to(like.dtype)


@dataclasses.dataclass(frozen=True)
class ModelSites:
    """Everything wellcond knows about one class of models; paths are relative to such a model.

    Attributes:
        input: what enters the first block, after positions are added.
        tokens: the tokens before positions are added; None where the model has no such place.
        causal: a token never sees later ones.
        arguments: names of arguments of the model's ``forward`` that ``mask`` reads.
        mask: from those arguments to a ``(B, N)`` mask, True = real; a module-level function (it is pickled).
        table: path of the token embedding; None where there is none.
        positions: path of the position embedding, a parameter or an ``nn.Embedding``; None where there is none.
    """

    input: Site
    tokens: Site | None = None
    causal: bool = False
    arguments: tuple[str, ...] = ()
    mask: MaskReader | None = None
    table: str | None = None
    positions: str | None = None


SiteFinder = Callable[[nn.Module], ModelSites]
