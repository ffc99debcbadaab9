"""The singular values of one real sample's tokens, before and after what an arm does to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attach import find_known, place_of
from wellcond.hooks import token_hooks
from wellcond.running import call_model, undisturbed
from wellcond.sites import Site


def token_spectra(model: nn.Module, batch: Any) -> dict[str, list[float] | None]:
    """σ of the first sample at the attached site (else at the first block's input): ``before`` and ``after``.

    ``after`` is None where nothing is attached. Raises ValueError where there is no known site.
    """
    hooks = token_hooks(model)
    place = hooks[0].site if hooks else place_of(find_known(model), "input")
    if place.side != "output":
        raise ValueError(
            f"site {place.module!r} receives its tokens; spectra are read where a module returns them"
        )
    found: dict[str, list[float] | None] = {"before": None, "after": None}
    handles = [_keep(model, place, found, "before", first=True)]
    if hooks:
        handles.append(_keep(model, place, found, "after", first=False))
    try:
        with undisturbed(model):
            call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _keep(
    model: nn.Module, place: Site, found: dict[str, list[float] | None], name: str, *, first: bool
) -> torch.utils.hooks.RemovableHandle:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        tokens: Tensor = place.as_tokens(output if place.key is None else output[place.key])
        found[name] = torch.linalg.svdvals(tokens[0].double()).tolist()

    return model.get_submodule(place.module).register_forward_hook(keep, prepend=first)
