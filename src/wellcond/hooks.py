"""The hooks that sit in a model: objects, not closures, so that deepcopy, pickle and spawn carry them along.

A hook holds its own ``RemovableHandle``. That object re-binds to the copied dictionary on deepcopy and pickle,
so the copy of a conditioned model is conditioned by hooks of its own, and they can be removed from it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellcond.config import ConditioningConfig
from wellcond.memory import Memory
from wellcond.sites import Found, ModelSites, Site


class CallCapture:
    """Pre-hook of the model: keeps the arguments that the padding mask is read from, until the call ends."""

    handle: RemovableHandle

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        parameters = inspect.signature(module.forward).parameters
        order = list(parameters)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [name for name in names if name not in order]
        if missing and not takes_any:
            raise ValueError(f"{type(module).__name__}.forward has no argument {missing}; it has {order}")
        self.index = {name: order.index(name) if name in order else len(order) for name in names}
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
    """Post-hook of a submodule: keeps what ``keep`` takes from its output until the call of the model ends."""

    def __init__(self, model: nn.Module, path: str, keep: Callable[[Any], Mapping[str, Any]]) -> None:
        self.keep = keep
        self.values: Mapping[str, Any] = {}
        self.handle: RemovableHandle = model.get_submodule(path).register_forward_hook(self)
        self.release = Release(model, self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.values = self.keep(output)

    def remove(self) -> None:
        self.handle.remove()
        self.release.handle.remove()


def capture_for(found: Found) -> CallCapture | OutputCapture | None:
    """What must be kept of each call of a known model, so that its mask can be read; None if nothing."""
    if found.sites.output_of is not None:
        return OutputCapture(found.module, *found.sites.output_of)
    if found.sites.arguments:
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
        if self.hook.calls == self.seen and not self.hook.compiled and not self.warned:
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

    Where a model can be handed tokens that its caller looked up (``inputs_embeds``), the site is the output of the
    table or, in such a call, that argument; then what the table does outside a call of the model is let be.

    Attributes:
        site: where, relative to the model it was attached to.
        transform: a module ``(x (..., N, d), mask (..., N) | None) -> (..., N, d)``.
        config: the configuration if the transform conditions; None for a control.
        calls: how often it ran in eager mode, for checks that it ran at all.
        compiled: whether it is part of compiled code, where calls are not counted.
        leaks: whether tokens see later ones although their model is causal.
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
        self.known = known if capture is not None else None
        self.calls = 0
        self.compiled = False
        self.leaks = known is not None and known.causal and config is not None and config.scope == "sample"
        self.ready: RemovableHandle | None = None
        self.memory: Memory | None = None
        self.check: ReachedCheck | None = None
        self.handle: RemovableHandle = (
            module.register_forward_pre_hook(self.replace_input, with_kwargs=True)
            if site.side == "input"
            else module.register_forward_hook(self.replace_output)
        )

    def take_ready(self, model: nn.Module) -> None:
        """Also take the tokens that a call of ``model``, whose arguments are captured, brings along."""
        self.ready = model.register_forward_pre_hook(self.replace_ready, with_kwargs=True)

    def replace_ready(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        assert self.known is not None
        assert self.known.ready is not None
        assert isinstance(self.capture, CallCapture)
        name, i = self.known.ready, self.capture.index[self.known.ready]
        tokens = self.capture.values.get(name)
        if tokens is None:
            return None
        tokens = self.replace_tensor(tokens, model, args)
        if i < len(args):
            return (*args[:i], tokens, *args[i + 1 :]), kwargs
        return args, {**kwargs, name: tokens}

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.ready is not None and self.capture is not None and not self.capture.values:
            return output
        return replace(output, self.site.key, lambda tokens: self.replace_tensor(tokens, module, args))

    def replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = self.site.key
        if isinstance(key, str) and key in kwargs:
            return args, {**kwargs, key: self.replace_tensor(kwargs[key], module, args)}
        if not args:
            if key is None and len(kwargs) >= 1:
                name = next(iter(kwargs))
                return args, {**kwargs, name: self.replace_tensor(kwargs[name], module, args)}
            raise ValueError(f"site {self.site.module!r} was called without tokens: {sorted(kwargs)}")
        i = key if isinstance(key, int) else 0
        return (*args[:i], self.replace_tensor(args[i], module, args), *args[i + 1 :]), kwargs

    def replace_tensor(self, tensor: Tensor, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        if torch.compiler.is_compiling():
            self.compiled = True  # only ever written there: what compiled code reads, it would guard on
        else:
            self.calls += 1
        tokens = self.site.as_tokens(tensor)
        return self.site.as_tensor(self.condition(tokens, module, args), tensor)

    def condition(self, tokens: Tensor, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        """What becomes of ``(..., N, d)`` tokens; ``module`` and ``args`` are the call at the site."""
        self.refuse_leak()
        return cast(Tensor, self.transform(tokens, self.mask_of(tokens)))

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """The padding mask ``(..., N)`` of this call, None if there is none."""
        if self.known is None or self.known.mask is None:
            return None
        mask = self.known.mask(self.call())
        return None if mask is None else self.site.token_mask(mask, tokens)

    def call(self) -> Mapping[str, Any]:
        """What was captured of the call in progress."""
        assert self.capture is not None
        if not self.capture.values:
            raise RuntimeError(
                f"site {self.site.module!r} was reached outside a call of its model, so that its padding and "
                f"positions are unknown. If gradient checkpointing computes it again in the backward pass, "
                f"turn that off for this model, or use scope='table', which needs neither"
            )
        return self.capture.values

    def refuse_leak(self) -> None:
        """Raise where the correction, computed from all tokens of this call, would tell some of them of later ones."""
        if self.config is None or self.config.scope not in (None, "sample") or self.known is None:
            return
        if self.known.causal and self.known.past is not None and self.known.past(self.call()):
            raise ValueError(
                "scope='sample' computes the correction from the whole sequence, of which a key-value cache holds "
                "only a part: call with use_cache=False, or use scope='table' or 'static'"
            )
        if self.known.causal_call is None or not self.known.causal_call(self.call()):
            return
        if not self.config.allow_leak:
            raise ValueError(
                f"this call hides later tokens (a causal mask), but scope='sample' computes the correction at "
                f"{self.site.module!r} from the whole sequence and would show every token the future; "
                f"scope='static' does not, and allow_leak=True lets it happen"
            )
        self.leaks = True

    def remember(self) -> None:
        """Write the configuration where a checkpoint of the model will carry it."""
        if self.memory is not None and self.config is not None:
            self.memory.write(self.config)

    def remove(self) -> None:
        if self.memory is not None:
            self.memory.erase()
        for companion in (self.handle, self.ready, self.capture, self.check):
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
            if isinstance(owner, TokenHook) and owner not in hooks:
                hooks.append(owner)
    return hooks


def drop_compiled_code() -> None:
    """Dynamo does not guard on hooks: what it compiled before would go on without, or with, the correction."""
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
