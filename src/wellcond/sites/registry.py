"""Which classes of models are known, and where in a given model one of them sits.

Classes are named by their dotted path, so that knowing a library does not mean importing it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from wellcond.sites.site import Layout, ModelSites, SiteFinder


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """How to read one class of self-attention modules.

    Attributes:
        heads: attribute with the number of heads; dots descend (``"config.num_attention_heads"``).
        outputs: path of the module whose *input* is the heads' outputs side by side, ``(..., N, heads·d_head)``;
            ``""``: they are the *output* of the attention module itself.
        layout: axes there, ``"NHWC"`` where the tokens still lie in their grid.
        over_channels: the softmax weighs channels (cross-covariance), so no mask of tokens fits the weights.
        weights: whether the layer has one softmax matrix at all; a product of several kernels (Nyström) has none.
    """

    heads: str
    outputs: str
    layout: Layout = "NLC"
    over_channels: bool = False
    weights: bool = True


@dataclasses.dataclass(frozen=True)
class Found:
    """A known model inside a model: its path, the module, and its sites relative to that path."""

    path: str
    module: nn.Module
    sites: ModelSites


class Registry:
    """Model and attention classes by dotted path; a second entry for a class is refused."""

    def __init__(self) -> None:
        self.models: dict[str, SiteFinder] = {}
        self.attentions: dict[str, AttentionKind] = {}

    def model(self, *classes: str) -> Callable[[SiteFinder], SiteFinder]:
        """Decorator: the function says where the sites of these classes (and their subclasses) are."""

        def enter(finder: SiteFinder) -> SiteFinder:
            for name in classes:
                _refuse_collision(name, self.models)
                self.models[name] = finder
            return finder

        return enter

    def attention(
        self,
        name: str,
        *,
        heads: str,
        outputs: str,
        layout: Layout = "NLC",
        over_channels: bool = False,
        weights: bool = True,
    ) -> None:
        """Enter a class of self-attention modules, see `AttentionKind`."""
        _refuse_collision(name, self.attentions)
        self.attentions[name] = AttentionKind(heads, outputs, layout, over_channels, weights)

    def known_models(self, model: nn.Module) -> list[Found]:
        """The outermost known models inside ``model``, in order of definition."""
        found: list[Found] = []
        for path, module in model.named_modules():
            inside_one = any(path == f.path or path.startswith(f.path + ".") or not f.path for f in found)
            if inside_one:
                continue
            name = next((name for name in class_paths(module) if name in self.models), None)
            sites = self.models[name](module) if name is not None else None
            if sites is not None:
                found.append(Found(path, module, sites))
        return found

    def attention_modules(self, model: nn.Module) -> list[tuple[str, nn.Module, AttentionKind]]:
        """Path, module and kind of every known self-attention inside ``model``, in order of definition."""
        rows = []
        for path, module in model.named_modules():
            name = next((name for name in class_paths(module) if name in self.attentions), None)
            if name is not None:
                rows.append((path, module, self.attentions[name]))
        return rows


def class_paths(module: nn.Module) -> Iterator[str]:
    """Dotted paths of the class of ``module`` and of its bases, most derived first."""
    for cls in type(module).__mro__:
        yield f"{cls.__module__}.{cls.__qualname__}"


def _refuse_collision(
    name: str, entries: dict[str, object] | dict[str, SiteFinder] | dict[str, AttentionKind]
) -> None:
    if name in entries:
        raise ValueError(
            f"{name} is registered already; subclass it, or register your own class under its own path"
        )
