"""docs/models.md, written from the registry, so that the page cannot say what the code does not do."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from wellcond.sites.registry import Found, Registry, class_paths
from wellcond.sites.site import Site

HEADER = """\
# Models

`condition_(model)` finds the embedded tokens of these models, alone or inside a larger one, by the class inside.
For any other model name the submodule that returns the tokens: `condition_(model, site="encoder.embed", layout="NLC")`.

This page is generated from the registry and tested against it; `make models` writes it anew.

* **input** is what enters the first block, **tokens** what there is before positions are added;
  a dash means that nothing is added, so that the two would be one place.
* **layout**: N batch, L tokens, C features, H and W a grid of tokens.
* **mask**: padding is kept out of the correction, whatever fills it.
"""

MODELS_HEAD = """\
| Example | Class | input | layout | tokens | layout | causal | mask |
|---|---|---|---|---|---|---|---|"""

ATTENTION_HEADER = """\
## Attention that is measured, head by head

Not among them: class attention (its weights are one row per head, whose κ is 1 always), VOLO's outlook attention
(its weights are not softmax(QKᵀ) of the tokens) and timm's differential attention (a difference of two softmaxes).
A window of a padded batch is measured as it is computed, padding included.

| Class | softmax over |
|---|---|"""


def models_page(registry: Registry, examples: Iterable[tuple[str, nn.Module]]) -> str:
    """The page as Markdown.

    Args:
        registry: the known classes.
        examples: names and models, each with exactly one known model inside.

    Raises:
        ValueError: an example has no known model inside, or several.
    """
    rows, shown = [], set()
    for name, model in examples:
        found = registry.known_models(model)
        if len(found) != 1:
            raise ValueError(f"example {name!r} has {len(found)} known models inside, not one")
        entry = next(path for path in class_paths(found[0].module) if path in registry.models)
        shown.add(entry)
        rows.append(_model_row(name, entry, found[0]))
    others = sorted(set(registry.models) - shown)
    attention = [
        f"| `{name}` | {'channels' if kind.over_channels else 'tokens'} |"
        for name, kind in sorted(registry.attentions.items())
    ]
    parts = [HEADER, "\n".join([MODELS_HEAD, *rows]), ""]
    if others:
        parts += [
            "Found in the same way as one of these: " + ", ".join(f"`{name}`" for name in others) + ".",
            "",
        ]
    return "\n".join([*parts, "\n".join([ATTENTION_HEADER, *attention]), ""])


def _model_row(name: str, entry: str, found: Found) -> str:
    sites = found.sites
    cells = [
        name,
        f"`{entry}`",
        *_place(sites.input),
        *(_place(sites.tokens) if sites.tokens is not None else ("–", "")),
        "yes" if sites.causal else "by call" if sites.causal_call is not None else "no",
        "yes" if sites.mask is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _place(site: Site) -> tuple[str, str]:
    key = "" if site.key is None else f", {site.key}" if isinstance(site.key, int) else f", `{site.key}`"
    if not site.module:
        return f"the model's own {site.side}{key}", site.layout
    return f"{site.side} of `{site.module}`{key}", site.layout
