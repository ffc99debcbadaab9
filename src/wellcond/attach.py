"""One line on a model: ``condition_`` puts the correction where its embedded tokens are."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from wellcond.config import ConditioningConfig, Placement
from wellcond.hooks import ReachedCheck, TokenHook, capture_for, token_hooks
from wellcond.sites import REGISTRY, Found, Layout, Site
from wellcond.tokens import TokenConditioner

CONFIG_FILE = "wellcond.json"


class ConditionHandle:
    """What `condition_` returns: the sites, the configuration, and the way back. Also a context manager."""

    def __init__(self, model: nn.Module, hook: TokenHook) -> None:
        self.model = model
        self.sites: tuple[Site, ...] = (hook.site,)
        self.config = hook.config

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

    Args:
        model: a model with one known transformer inside (see ``docs/models.md``), or any with ``site``.
        config: the options; default `ConditioningConfig()`.
        site: dotted path of a submodule whose *output* is the tokens, for models that are not known.
        layout: axes of that output, ``"NLC"`` (default), ``"LNC"``, ``"NHWC"`` or ``"NCHW"``.

    Returns:
        ConditionHandle with ``sites``, ``config`` and ``remove()``.

    Raises:
        ValueError: the model is conditioned already, has no known site or several, ``site`` is not a
            submodule, or the placement does not exist in this model. The message lists the candidates.

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
    return attach_(model, TokenConditioner(config), config, config.placement, site=site, layout=layout)


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
    if token_hooks(model):
        raise ValueError(
            f"tokens of this {type(model).__name__} are conditioned already at "
            f"{[hook.site.module for hook in token_hooks(model)]}; call wellcond.remove_(model) first"
        )
    found, place = _resolve(model, placement, site, layout)
    capture = capture_for(found) if found is not None else None
    known = found.sites if found is not None else None
    hook = TokenHook(model.get_submodule(place.module), place, transform, config, known, capture)
    hook.check = ReachedCheck(found.module if found is not None else model, hook)
    drop_compiled_code()
    return ConditionHandle(model, hook)


def is_conditioned(model: nn.Module) -> bool:
    """Whether ``model`` or a module inside it is conditioned."""
    return any(hook.config is not None for hook in token_hooks(model))


def remove_(model: nn.Module) -> None:
    """Take off whatever `condition_` put on; nothing happens if there is nothing.

    >>> from torch import nn
    >>> remove_(nn.Linear(2, 2))
    """
    hooks = token_hooks(model)
    for hook in hooks:
        hook.remove()
    if hooks:
        drop_compiled_code()


def save_config(model: nn.Module, directory: str | Path) -> Path:
    """Write how ``model`` is conditioned to ``directory/wellcond.json``, beside its checkpoint.

    Raises ValueError if it is not conditioned. Returns the path of the file.
    """
    hooks = [hook for hook in token_hooks(model) if hook.config is not None]
    if not hooks:
        raise ValueError(f"this {type(model).__name__} is not conditioned; there is nothing to save")
    path = Path(directory) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    config = hooks[0].config
    assert config is not None
    record = {"config": config.to_dict(), "site": dataclasses.asdict(hooks[0].site)}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def restore_(model: nn.Module, directory: str | Path) -> ConditionHandle:
    """Condition ``model`` the way the checkpoint in ``directory`` was (`save_config`).

    Raises:
        FileNotFoundError: no ``wellcond.json`` there.
        ValueError: the file is not readable, names a site that this model does not have, or as `condition_`.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: that checkpoint was not saved with wellcond.save_config; "
            f"if it was trained conditioned, call wellcond.condition_(model, config) with the same config"
        )
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        config = ConditioningConfig.from_dict(record["config"])
        place = Site(**record["site"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a wellcond configuration: {error}") from error
    found, usual = _resolve_known(model, config.placement)
    if found is not None and usual is not None and usual == place:
        return condition_(model, config)
    if place.side == "output" and place.key is None:
        return condition_(model, config, site=place.module, layout=place.layout)
    raise ValueError(f"{path} conditions {place}, but this {type(model).__name__} has {usual}")


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


def _resolve_known(model: nn.Module, placement: Placement) -> tuple[Found | None, Site | None]:
    found = REGISTRY.known_models(model)
    return (found[0], place_of(found[0], placement)) if len(found) == 1 else (None, None)


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


def drop_compiled_code() -> None:
    """Dynamo does not guard on hooks: what it compiled before would go on without, or with, the correction."""
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
