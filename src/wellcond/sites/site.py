"""What a site is: the place in a model where the embedded tokens pass, and how to read them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellcond.linalg import choose

Layout = Literal["NLC", "LNC", "NHWC", "NCHW"]
Side = Literal["input", "output"]
MaskReader = Callable[[Mapping[str, Any]], Tensor | None]
RowReader = Callable[[Mapping[str, Any], int], Tensor | None]
Placement = Literal["input", "tokens"]


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
        prefix: how many tokens come before the first position (class and register tokens).
        patch: pixels of an image per token, (height, width); None where tokens are not patches.
    """

    module: str
    side: Side = "output"
    layout: Layout = "NLC"
    key: int | str | None = None
    prefix: int = 0
    patch: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        choose("layout", self.layout, Layout)
        choose("side", self.side, Side)
        if self.patch is not None:  # JSON knows lists only
            object.__setattr__(self, "patch", tuple(self.patch))

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

    def token_mask(self, mask: Tensor, tokens: Tensor) -> Tensor:
        """A mask over positions ``(B, N)`` or pixels ``(B, H, W)`` as one over these tokens ``(B, N, d)``.

        A patch with any real pixel is a real token; prefix tokens are always real. Raises ValueError where
        the mask does not fit.

        >>> import torch
        >>> pixels = torch.zeros(1, 4, 8, dtype=torch.bool)
        >>> pixels[:, :3, :5] = True
        >>> Site("", patch=(2, 2), prefix=1).token_mask(pixels, torch.zeros(1, 9, 3)).tolist()
        [[True, True, True, True, False, True, True, True, False]]
        """
        n = tokens.shape[-2]
        positions = mask
        if mask.ndim == 3 and self.patch is not None:
            pooled = functional.max_pool2d(mask[:, None].float(), self.patch, ceil_mode=True)
            positions = pooled.flatten(1) > 0
        if positions.shape[-1] == n - self.prefix and self.prefix:
            ahead = positions.new_ones(*positions.shape[:-1], self.prefix)
            positions = torch.cat([ahead, positions], -1)
        if positions.shape != tokens.shape[:-1]:
            raise ValueError(
                f"a padding mask of shape {tuple(mask.shape)} does not fit the tokens at site {self.module!r}, "
                f"shape {tuple(tokens.shape)} with {self.prefix} prefix tokens and patches of {self.patch} pixels"
            )
        return positions


@dataclasses.dataclass(frozen=True)
class ModelSites:
    """Everything wellcond knows about one class of models; paths are relative to such a model.

    Attributes:
        input: what enters the first block, after positions are added.
        tokens: the tokens before positions are added; None where the model has no such place.
        causal: a token never sees later ones.
        arguments: names of arguments of the model's ``forward`` that ``mask`` and ``causal_call`` read.
        output_of: in place of arguments: path of a submodule, and a module-level function from its output to the
            values that they read. It runs where the submodule does, so that a compiled site sees tensors only.
        mask: from those to a mask of positions ``(B, N)`` or pixels ``(B, H, W)``, True = real, or None; a
            module-level function (it is pickled).
        causal_call: from those to whether this call hides later tokens, where only the call decides.
        past: from those to the number of tokens that a key-value cache holds before this call's.
        rows: from those and the number of tokens N to the positions ``(B or 1, N)`` the model gives them, −1 for
            none; its result None: 0, 1, 2, …. The reader None: real tokens are counted, padding has no position.
        ready: argument that carries tokens looked up by the caller, in place of the output of the table.
        table: path of the token embedding; None where there is none.
        positions: path of the position embedding, a parameter or an ``nn.Embedding``; None where there is none.
        folds: for each placement where tokens and positions are only added to each other from there on: the row of
            the position embedding that token 0 gets.
    """

    input: Site
    tokens: Site | None = None
    causal: bool = False
    arguments: tuple[str, ...] = ()
    output_of: tuple[str, Callable[[Any], Mapping[str, Any]]] | None = None
    mask: MaskReader | None = None
    causal_call: Callable[[Mapping[str, Any]], bool] | None = None
    past: Callable[[Mapping[str, Any]], int] | None = None
    rows: RowReader | None = None
    ready: str | None = None
    table: str | None = None
    positions: str | None = None
    folds: Mapping[Placement, int] = dataclasses.field(default_factory=dict)


SiteFinder = Callable[[nn.Module], ModelSites | None]
"""Where the sites of a module of a registered class are; None: this one holds no transformer of its own."""
