"""The hooks that sit in a model: objects, not closures, so that deepcopy, pickle and spawn carry them along.

A hook holds its own ``RemovableHandle``. That object re-binds to the copied dictionary on deepcopy and pickle,
so the copy of a conditioned model is conditioned by hooks of its own, and they can be removed from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellcond.config import ConditioningConfig
from wellcond.sites import ModelSites, Site


class CallCapture:
    """Pre-hook of the model: keeps the arguments that the padding mask is read from, until the call ends."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        order = list(inspect.signature(module.forward).parameters)
        missing = [name for name in names if name not in order]
        if missing:
            raise ValueError(f"{type(module).__name__}.forward has no argument {missing}; it has {order}")
        self.index = {name: order.index(name) for name in names}
        self.values: dict[str, Any] = {}
        self.handle: RemovableHandle = module.register_forward_pre_hook(self, with_kwargs=True)
        self.release = Release(module, self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {
            name: args[i] if i < len(args) else kwargs.get(name) for name, i in self.index.items()
        }

    def remove(self) -> None:
        self.handle.remove()
        self.release.handle.remove()


class Release:
    """Post-hook of the model: forgets the captured arguments, also after an error."""

    def __init__(self, module: nn.Module, capture: CallCapture) -> None:
        self.capture = capture
        self.handle: RemovableHandle = module.register_forward_hook(self, always_call=True)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.capture.values = {}


class TokenHook:
    """Replaces the tokens at one site by ``transform(tokens, mask)``.

    Attributes:
        site: where, relative to the model it was attached to.
        transform: a module ``(x (..., N, d), mask (..., N) | None) -> (..., N, d)``.
        config: the configuration if the transform conditions; None for a control.
        calls: how often it ran in eager mode, for checks that it ran at all.
    """

    def __init__(
        self,
        module: nn.Module,
        site: Site,
        transform: nn.Module,
        config: ConditioningConfig | None,
        known: ModelSites | None,
        capture: CallCapture | None,
    ) -> None:
        self.site = site
        self.transform = transform
        self.config = config
        self.capture = capture
        self.mask_reader = known.mask if known is not None and capture is not None else None
        self.calls = 0
        self.handle: RemovableHandle = (
            module.register_forward_pre_hook(self.replace_input, with_kwargs=True)
            if site.side == "input"
            else module.register_forward_hook(self.replace_output)
        )

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return replace(output, self.site.key, self.replace_tensor)

    def replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = self.site.key
        if isinstance(key, str) and key in kwargs:
            return args, {**kwargs, key: self.replace_tensor(kwargs[key])}
        if not args:
            if key is None and len(kwargs) >= 1:
                name = next(iter(kwargs))
                return args, {**kwargs, name: self.replace_tensor(kwargs[name])}
            raise ValueError(f"site {self.site.module!r} was called without tokens: {sorted(kwargs)}")
        i = key if isinstance(key, int) else 0
        return (*args[:i], self.replace_tensor(args[i]), *args[i + 1 :]), kwargs

    def replace_tensor(self, tensor: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        tokens = self.site.as_tokens(tensor)
        mask = self.mask_reader(self.capture.values) if self.mask_reader and self.capture else None
        return self.site.as_tensor(self.transform(tokens, mask), tensor)

    def remove(self) -> None:
        self.handle.remove()
        if self.capture is not None:
            self.capture.remove()


def replace(value: Any, key: int | str | None, change: Any) -> Any:
    """``value`` with the element at ``key`` (None: the value itself) changed; containers are copied."""
    if key is None:
        return change(value)
    if isinstance(key, int):
        return type(value)((*value[:key], change(value[key]), *value[key + 1 :]))
    if isinstance(value, Mapping):
        return type(value)(**{**value, key: change(value[key])})
    raise TypeError(f"key {key!r} needs a mapping at the site, got {type(value).__name__}")


def token_hooks(model: nn.Module) -> list[TokenHook]:
    """Every TokenHook inside ``model``, in order of its modules."""
    hooks: list[TokenHook] = []
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, TokenHook):
                hooks.append(owner)
    return hooks
