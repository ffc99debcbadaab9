"""The singular values of one real sample's tokens, before and after what an arm does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attach import find_known, place_of
from wellcond.hooks import capture_for, token_hooks
from wellcond.running import call_model, undisturbed
from wellcond.sites import Site


def token_spectra(model: nn.Module, batch: Any) -> dict[str, list[float] | None]:
    """σ of the first sample's real tokens at the attached site (else the first block's input): ``before``, ``after``.

    ``after`` is None where nothing is attached. Raises ValueError where there is no known site.
    """
    hooks = token_hooks(model)
    known = None if hooks else find_known(model)
    place = hooks[0].site if known is None else place_of(known, "input")
    if place.side != "output":
        raise ValueError(
            f"site {place.module!r} receives its tokens; spectra are read where a module returns them"
        )
    capture = None if known is None else capture_for(known)

    def mask_of(tokens: Tensor) -> Tensor | None:
        if known is None:
            return hooks[0].mask_of(tokens)
        if capture is None or known.sites.mask is None:
            return None
        mask = known.sites.mask(capture.values)
        return None if mask is None else place.token_mask(mask, tokens)

    found: dict[str, list[float] | None] = {"before": None, "after": None}
    handles: list[Any] = [] if capture is None else [capture]
    handles.append(_keep(model, place, mask_of, found, "before", first=True))
    if hooks:
        handles.append(_keep(model, place, mask_of, found, "after", first=False))
    try:
        with undisturbed(model):
            call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _keep(
    model: nn.Module,
    place: Site,
    mask_of: Callable[[Tensor], Tensor | None],
    found: dict[str, list[float] | None],
    name: str,
    *,
    first: bool,
) -> torch.utils.hooks.RemovableHandle:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        tokens: Tensor = place.as_tokens(output if place.key is None else output[place.key])
        mask = mask_of(tokens)
        real = tokens[0] if mask is None else tokens[0][mask[0]]
        found[name] = torch.linalg.svdvals(real.double()).tolist()

    return model.get_submodule(place.module).register_forward_hook(keep, prepend=first)
