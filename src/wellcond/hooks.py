"""The hooks that sit in a model: objects, not closures, so that deepcopy, pickle and spawn carry them along.

A hook holds its own ``RemovableHandle``. That object re-binds to the copied dictionary on deepcopy and pickle,
so the copy of a conditioned model is conditioned by hooks of its own, and they can be removed from it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellcond.config import ConditioningConfig
from wellcond.sites import Found, ModelSites, Site


class CallCapture:
    """Pre-hook of the model: keeps the arguments that the padding mask is read from, until the call ends."""

    handle: RemovableHandle

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        order = list(inspect.signature(module.forward).parameters)
        missing = [name for name in names if name not in order]
        if missing:
            raise ValueError(f"{type(module).__name__}.forward has no argument {missing}; it has {order}")
        self.index = {name: order.index(name) for name in names}
        self.values: dict[str, Any] = {}
        self.attach(module)
        self.release = Release(module, self)

    def attach(self, module: nn.Module, *, first: bool = False) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True, prepend=first)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {name: args[i] if i < len(args) else kwargs.get(name) for name, i in self.index.items()}

    def remove(self) -> None:
        self.handle.remove()
        self.release.handle.remove()


class OutputCapture:
    """Post-hook of a submodule: keeps its output under ``"output"`` until the call of the model ends."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.values: dict[str, Any] = {}
        self.handle: RemovableHandle = model.get_submodule(path).register_forward_hook(self)
        self.release = Release(model, self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.values = {"output": output}

    def remove(self) -> None:
        self.handle.remove()
        self.release.handle.remove()


def capture_for(found: Found) -> CallCapture | OutputCapture | None:
    """What must be kept of each call of a known model, so that its mask can be read; None if nothing."""
    if found.sites.output_of is not None:
        return OutputCapture(found.module, found.sites.output_of)
    if found.sites.mask is not None or found.sites.causal_call is not None:
        return CallCapture(found.module, found.sites.arguments)
    return None


class Release:
    """Post-hook of the model: forgets what was captured, also after an error."""

    def __init__(self, module: nn.Module, capture: CallCapture | OutputCapture) -> None:
        self.capture = capture
        self.handle: RemovableHandle = module.register_forward_hook(self, always_call=True)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.capture.values = {}


class ReachedCheck:
    """Post-hook of the model: warns once if a whole forward went by without reaching the conditioned site."""

    def __init__(self, model: nn.Module, hook: TokenHook) -> None:
        self.hook = hook
        self.seen = 0
        self.warned = False
        self.handle: RemovableHandle = model.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.hook.calls == self.seen and not self.warned:
            self.warned = True
            warnings.warn(
                f"a forward of {type(module).__name__} did not reach the site {self.hook.site.module!r}: its "
                f"tokens were not conditioned. Was a part of the model replaced after condition_? "
                f"Then call wellcond.remove_(model) and wellcond.condition_(model) again",
                RuntimeWarning,
                stacklevel=3,
            )
        self.seen = self.hook.calls

    def remove(self) -> None:
        self.handle.remove()


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
        capture: CallCapture | OutputCapture | None,
    ) -> None:
        self.site = site
        self.transform = transform
        self.config = config
        self.capture = capture
        self.mask_reader = known.mask if known is not None and capture is not None else None
        self.causal_call = known.causal_call if known is not None and capture is not None else None
        self.calls = 0
        self.check: ReachedCheck | None = None
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
        self.refuse_leak()
        mask = self.mask_reader(self.capture.values) if self.mask_reader and self.capture else None
        if mask is not None:
            mask = self.site.token_mask(mask, tokens)
        return self.site.as_tensor(self.transform(tokens, mask), tensor)

    def refuse_leak(self) -> None:
        """Raise if this call hides later tokens while the correction, computed from all of them, would show them."""
        config = self.config
        if config is None or config.allow_leak or config.scope not in (None, "sample"):
            return
        if self.causal_call and self.capture and self.causal_call(self.capture.values):
            raise ValueError(
                f"this call hides later tokens (a causal mask), but scope='sample' computes the correction at "
                f"{self.site.module!r} from the whole sequence and would show every token the future; "
                f"scope='static' does not, and allow_leak=True lets it happen"
            )

    def remove(self) -> None:
        self.handle.remove()
        for companion in (self.capture, self.check):
            if companion is not None:
                companion.remove()


def replace(value: Any, key: int | str | None, change: Any) -> Any:
    """``value`` with the element at ``key`` (None: the value itself) changed; containers are copied."""
    if key is None:
        return change(value)
    if isinstance(key, int):
        items = (*value[:key], change(value[key]), *value[key + 1 :])
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
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
