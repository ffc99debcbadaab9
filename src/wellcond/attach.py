"""One line on a model: ``condition_`` puts the correction where its embedded tokens are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType

from torch import nn

from wellcond.config import ConditioningConfig, Placement
from wellcond.hooks import ReachedCheck, TokenHook, capture_for, drop_compiled_code, token_hooks
from wellcond.memory import Memory, forget, warn_unlike
from wellcond.sites import REGISTRY, Found, Layout, Site
from wellcond.static import PositionCode, StaticHook
from wellcond.table import TableConditioner, TableHook
from wellcond.tokens import TokenConditioner


class ConditionHandle:
    """What `condition_` returns: the sites, the configuration, and the way back. Also a context manager."""

    def __init__(self, model: nn.Module, hook: TokenHook) -> None:
        self.model = model
        self.sites: tuple[Site, ...] = (hook.site,)
        self._hook = hook

    @property
    def config(self) -> ConditioningConfig | None:
        """The options in force: the scope that was chosen, σ₁ once calibrated. None for a control."""
        return self._hook.config

    @property
    def leaks(self) -> bool:
        """Whether tokens see later ones although their model is causal (``allow_leak=True``)."""
        return self._hook.leaks

    def remove(self) -> None:
        """Take the conditioning off again; outputs are bit-equal to those before. Twice is harmless."""
        remove_(self.model)

    def __enter__(self) -> ConditionHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"ConditionHandle(sites={self.sites}, config={self.config})"


def condition_(
    model: nn.Module,
    config: ConditioningConfig | None = None,
    *,
    site: str | None = None,
    layout: Layout | None = None,
) -> ConditionHandle:
    """Condition the embedded tokens of ``model`` in place: one line on any known model.

    No parameter, buffer or state-dict key is added, no wrapper put around the model. A deepcopy, a pickle or
    a ``torch.save`` of the model is conditioned too, independently. Already compiled code is dropped, so that
    attaching after ``torch.compile`` takes effect at the next call.

    The scope, where ``config`` leaves it open, is ``"table"`` on a causal model and ``"sample"`` on every other; of an
    encoder and decoder the encoder is conditioned. With ``"table"`` and ``inputs_embeds``, what the model's own
    embedding returned is conditioned already and any other vector (a soft prompt) is taken as it is.

    Args:
        model: a model with one known transformer inside (see ``docs/models.md``), or any with ``site``.
        config: the options; default `ConditioningConfig()`.
        site: dotted path of a submodule whose *output* is the tokens, for models that are not known.
        layout: axes of that output, ``"NLC"`` (default), ``"LNC"``, ``"NHWC"`` or ``"NCHW"``.

    Returns:
        ConditionHandle with ``sites``, ``config`` and ``remove()``.

    Raises:
        ValueError: the model is conditioned already, has no known site or several, ``site`` is not a
            submodule, or the placement does not exist in this model; the message lists the candidates. Scope
            ``"sample"`` on a causal model without ``allow_leak``; ``"table"`` on a model without a token embedding.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    >>> with condition_(model, site="0") as handle:
    ...     is_conditioned(model), handle.sites[0].module
    (True, '0')
    >>> is_conditioned(model)
    False
    """
    config = config or ConditioningConfig()
    refuse_second(model)
    target = Target.of(model, config.placement, site, layout)
    config = dataclasses.replace(config, scope=config.scope or ("table" if target.causal else "sample"))
    warn_unlike(model, config)
    assert config.scope is not None
    return _finish(target, SCOPES[config.scope](target, config))


def attach_(
    model: nn.Module,
    transform: nn.Module,
    config: ConditioningConfig | None,
    placement: Placement,
    *,
    site: str | None = None,
    layout: Layout | None = None,
) -> ConditionHandle:
    """Put any ``transform(x, mask) -> x`` at the site that `condition_` would use; for controls.

    ``config`` is None for a transform that does not condition. Raises as `condition_`.
    """
    refuse_second(model)
    target = Target.of(model, placement, site, layout)
    return _finish(target, target.hook(TokenHook, transform, config))


def attach_to_table_(model: nn.Module, transform: nn.Module) -> ConditionHandle:
    """Put any ``transform(x, table, ids) -> x`` where scope "table" would be; for controls. Raises as `condition_`."""
    refuse_second(model)
    target = Target.of(model, "input", None, None)
    return _finish(target, target.hook(TableHook, transform, None, table_place(target), ready=False))


def refuse_second(model: nn.Module) -> None:
    """ValueError if ``model`` is conditioned already."""
    if token_hooks(model):
        raise ValueError(
            f"tokens of this {type(model).__name__} are conditioned already at "
            f"{[hook.site.module for hook in token_hooks(model)]}; call wellcond.remove_(model) first"
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a correction goes.

    Attributes:
        model: the model that was handed in.
        found: the known model inside it; None where the caller named a site.
        place: where the tokens pass, seen from ``model``.
        causal: whether the tokens there never see later ones.
    """

    model: nn.Module
    found: Found | None
    place: Site
    causal: bool

    @classmethod
    def of(cls, model: nn.Module, placement: Placement, site: str | None, layout: Layout | None) -> Target:
        """The target of `condition_`'s arguments; ValueError where there is none."""
        found, place = _resolve(model, placement, site, layout)
        around = [found] if found is not None else REGISTRY.known_models(model)
        causal = any(f.sites.causal and is_below(place.module, f.path) for f in around)
        return cls(model, found, place, causal)

    def hook(
        self,
        kind: type[TokenHook],
        transform: nn.Module,
        config: ConditioningConfig | None,
        place: Site | None = None,
        *,
        ready: bool = True,
    ) -> TokenHook:
        """A hook of a kind at ``place``; with ``ready``, also on tokens that the caller looked up."""
        place = place or self.place
        known, capture = None, None
        if self.found is not None:
            known, capture = self.found.sites, capture_for(self.found)
        hook = kind(self.model.get_submodule(place.module), place, transform, config, known, capture)
        hook.leaks = self.causal and config is not None and config.scope == "sample"
        if ready and self.found is not None and self.found.sites.ready is not None and self.at_table(place):
            hook.take_ready(self.found.module)
        return hook

    def at_table(self, place: Site) -> bool:
        """Whether the tokens at ``place`` are what the token embedding returns, so that a caller may bring them."""
        assert self.found is not None
        table = self.found.sites.table
        return table is not None and place == Site(table).below(self.found.path)


def sample_scope(target: Target, config: ConditioningConfig) -> TokenHook:
    """Each image or sequence on its own; refused where that shows tokens the future."""
    if target.causal and not config.allow_leak:
        raise ValueError(
            f"this {type(target.model).__name__} is causal: scope='sample' computes the correction from the whole "
            f"sequence, so every token would see the future, and a lower training loss would not be real. Use "
            f"scope='table' (the default here) or 'static'; allow_leak=True lets it happen, and says so in every report"
        )
    return target.hook(TokenHook, TokenConditioner(config), config)


def table_scope(target: Target, config: ConditioningConfig) -> TokenHook:
    """The token embedding, wherever the model's tokens are read; or the ``nn.Embedding`` named as site."""
    return target.hook(TableHook, TableConditioner(config), config, table_place(target), ready=False)


def table_place(target: Target) -> Site:
    """Where the rows of the token embedding come out; ValueError where there is none."""
    if target.found is None:
        place = target.place
    elif target.found.sites.table is not None:
        place = Site(target.found.sites.table).below(target.found.path)
    else:
        raise ValueError(
            f"{type(target.found.module).__name__} has no token embedding: scope='table' is for language models; "
            f"use scope='sample' or 'static'"
        )
    table = target.model.get_submodule(place.module)
    if not isinstance(table, nn.Embedding):
        raise ValueError(
            f"scope='table' conditions an nn.Embedding, but {place.module!r} is a {type(table).__name__}; name the "
            f"embedding with site="
        )
    return place


def static_scope(target: Target, config: ConditioningConfig) -> TokenHook:
    """A fixed code of the position."""
    return target.hook(StaticHook, PositionCode(config), config)


SCOPES: dict[str, Callable[[Target, ConditioningConfig], TokenHook]] = {
    "sample": sample_scope,
    "table": table_scope,
    "static": static_scope,
}


def _finish(target: Target, hook: TokenHook) -> ConditionHandle:
    found = target.found
    hook.check = ReachedCheck(found.module if found is not None else target.model, hook)
    if hook.config is not None:
        hook.memory = Memory(
            target.model, hook.site, type(found.module).__name__ if found is not None else None
        )
        hook.remember()
    drop_compiled_code()
    return ConditionHandle(target.model, hook)


def is_conditioned(model: nn.Module) -> bool:
    """Whether ``model`` or a module inside it is conditioned."""
    return any(hook.config is not None for hook in token_hooks(model))


def leaks(model: nn.Module) -> bool:
    """Whether ``model`` is conditioned so that tokens see later ones although it is causal (``allow_leak=True``).

    An ``nn.TransformerEncoder``, which is causal only by its calls, is known to leak once it was called so.
    """
    return any(hook.leaks for hook in token_hooks(model))


def remove_(model: nn.Module) -> None:
    """Take off whatever `condition_` put on; nothing happens if there is nothing.

    Of a Hugging Face model that was loaded from a conditioned checkpoint and is not conditioned, it takes the record
    in ``model.config`` away, and with it the warning.

    >>> from torch import nn
    >>> remove_(nn.Linear(2, 2))
    """
    hooks = token_hooks(model)
    for hook in hooks:
        hook.remove()
    forget(model)
    if hooks:
        drop_compiled_code()


# ------------------------------------------------------------------------------------------- finding sites


def find_known(model: nn.Module) -> Found:
    """The one known transformer inside ``model``; ValueError with the candidates where there is none or several."""
    found = REGISTRY.known_models(model)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"no known transformer inside {type(model).__name__}. Name the submodule that returns the tokens: "
            f"condition_(model, site=..., layout=...); its children are "
            f"{[f'{name}: {type(child).__name__}' for name, child in model.named_children()]}. "
            f"Known classes: {sorted(REGISTRY.models)}"
        )
    raise ValueError(
        f"{len(found)} transformers inside {type(model).__name__}: "
        f"{[f'{f.path}: {type(f.module).__name__}' for f in found]}. "
        f"Condition one of them, condition_(model.get_submodule(...)), or name its site="
    )


def _resolve(
    model: nn.Module, placement: Placement, site: str | None, layout: Layout | None
) -> tuple[Found | None, Site]:
    if site is None:
        if layout is not None:
            raise ValueError(f"layout={layout!r} describes a site; pass site= with it")
        found = find_known(model)
        return found, place_of(found, placement)
    try:
        model.get_submodule(site)
    except AttributeError:
        raise ValueError(
            f"{type(model).__name__} has no submodule {site!r}; it has {_close_names(model, site)}"
        ) from None
    return None, Site(site, layout=layout or "NLC")


def place_of(found: Found, placement: Placement) -> Site:
    """The site of a placement, seen from the outer model; ValueError where the model has no such place."""
    place = found.sites.input if placement == "input" else found.sites.tokens
    if place is None:
        raise ValueError(
            f"{type(found.module).__name__} adds no positions to its tokens: placement='tokens' and "
            f"placement='input' are the same place; use the latter"
        )
    return place.below(found.path)


def _close_names(model: nn.Module, name: str) -> list[str]:
    import difflib

    names = [path for path, _ in model.named_modules() if path]
    return difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names[:10]


def is_below(path: str, root: str) -> bool:
    """Whether a module path lies at or below another.

    >>> is_below("bert.embeddings", "bert"), is_below("bertha", "bert"), is_below("x", "")
    (True, False, True)
    """
    return not root or path == root or path.startswith(root + ".")
