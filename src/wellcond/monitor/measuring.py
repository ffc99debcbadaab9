"""measure: the condition numbers of a model's tokens and attention on one batch, as a table of rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellcond.attach import find_known, place_of
from wellcond.checkpoint import warn_if_forgotten
from wellcond.hooks import CallCapture, OutputCapture, TokenHook, capture_for, token_hooks
from wellcond.monitor.attention import AttentionReader, AttentionWatch
from wellcond.monitor.rows import Reading, Row, read, summarise
from wellcond.running import call_model, undisturbed
from wellcond.sites import REGISTRY, Site


def measure(model: nn.Module, batch: Any, *, step: int = 0, weights: bool = True) -> list[Row]:
    """Condition numbers of the embedded tokens and of every self-attention head of ``model`` on ``batch``.

    Runs one forward of its own: eager even where the model is compiled, in eval mode, without gradients.
    Weights, buffers, training flags and random state are afterwards what they were, and nothing stays in
    memory but the rows. Under DDP every process may call it or only one; under FSDP all must.

    Args:
        model: a model with one known transformer inside, or one conditioned at a site of yours.
        batch: what the model is called with: a tensor, a tuple (``model(*batch)``) or a mapping
            (``model(**batch)``).
        step: entered in every row.
        weights: also measure the N×N softmax matrices, whose SVD costs N³ per head.

    Returns:
        Rows: first ``tokens``; then, if conditioned, ``conditioned.before`` and ``conditioned.after``; then
        ``attention.output`` and ``attention.weights`` by layer and head.

    Raises:
        ValueError: no known transformer, or several.
        RuntimeError: a site never ran in this forward, so that its row would be missing.

    Warns where the model has no attention of a known class, since only its tokens are then measured.

    >>> import torch
    >>> from torch import nn
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> rows = measure(encoder, torch.randn(3, 5, 8))
    >>> rows[0].site, rows[0].rank, rows[0].samples
    ('tokens', 5, 3)
    """
    inner = unwrapped(model)
    warn_if_forgotten(inner)
    hooks = token_hooks(inner)
    probes = _Probes(inner, hooks)
    watched = {
        module: AttentionReader(module, kind, lambda: probes.token_mask)
        for _, module, kind in REGISTRY.attention_modules(inner)
    }
    if not watched:
        warnings.warn(
            f"no self-attention that wellcond knows inside {type(inner).__name__}: only its tokens were measured. "
            f"Enter the class of its attention: wellcond.sites.REGISTRY.attention(path, heads=..., outputs=...)",
            stacklevel=2,
        )
    watch = AttentionWatch(watched)
    calls = [hook.calls for hook in hooks]
    try:
        with undisturbed(inner), watch:
            call_model(inner, batch)
    finally:
        watch.remove()
        probes.remove()

    for hook, before in zip(hooks, calls, strict=True):
        if hook.calls == before:
            raise RuntimeError(f"the conditioned site {hook.site.module!r} was not reached by this forward")
    rows = [Row(step=step, layer=None, head=None, **fields) for fields in probes.fields()]
    for layer, (path, module, _) in enumerate(REGISTRY.attention_modules(inner)):
        rows += list(_head_rows(watched[module], step, layer, path, weights))
    return rows


def _head_rows(reader: AttentionReader, step: int, layer: int, path: str, weights: bool) -> Iterator[Row]:
    readings = {
        "attention.output": reader.outputs,
        "attention.weights": reader.weights if weights and reader.kind.weights else (),
    }
    for site, reading in readings.items():
        if reading is None:
            raise RuntimeError(
                f"{site} of {path!r} was never computed in this forward: the layer did not run, or it uses an "
                f"attention kernel that wellcond cannot see; no row is better than a wrong one"
            )
        if not reading:
            continue
        spectra, present = reading
        for head in range(reader.heads):
            one_head = type(spectra)(*(value[:, head] for value in spectra))
            fields = summarise((one_head, present[:, head]))
            yield Row(step=step, site=site, layer=layer, head=head, module=path, **fields)


class _Probes:
    """Reads tokens on their way: what enters the first block, and both sides of an attached correction."""

    def __init__(self, model: nn.Module, hooks: list[TokenHook]) -> None:
        self.readings: dict[str, tuple[str, Reading]] = {}
        self.handles: list[RemovableHandle] = []
        self.capture: CallCapture | OutputCapture | None = None
        self.reader = None
        self.token_mask: Tensor | None = None
        self.expected = ["tokens"]
        self.known: nn.Module | None = None
        self.ready: tuple[str, str] | None = None

        known = REGISTRY.known_models(model)
        if known or not hooks:
            found = find_known(model)
            place = place_of(found, "input")
            self.known = found.module
            self.reader = found.sites.mask
            self.capture = capture_for(found)
            if found.sites.ready is not None and found.sites.table is not None:
                self.ready = found.sites.ready, Site(found.sites.table).below(found.path).module
        else:
            place = hooks[0].site
        self.watch(model, place, "tokens", first=False)
        if hooks:
            self.expected += ["conditioned.before", "conditioned.after"]
            self.watch(model, hooks[0].site, "conditioned.before", first=True)
            self.watch(model, hooks[0].site, "conditioned.after", first=False)

    def watch(self, model: nn.Module, place: Site, name: str, *, first: bool) -> None:
        module = model.get_submodule(place.module)

        def on_output(module: nn.Module, args: Any, output: Any) -> None:
            self.take(name, place, output if place.key is None else output[place.key])

        def on_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if isinstance(place.key, str) and place.key in kwargs:
                self.take(name, place, kwargs[place.key])
            elif args:
                self.take(name, place, args[place.key if isinstance(place.key, int) else 0])
            else:
                self.take(name, place, next(iter(kwargs.values())))

        self.handles.append(
            module.register_forward_pre_hook(on_input, with_kwargs=True, prepend=first)
            if place.side == "input"
            else module.register_forward_hook(on_output, prepend=first)
        )
        on_model = place.side == "input" and module is self.known
        if self.ready is not None and place.module == self.ready[1]:
            on_model = True
            self.watch_ready(place, name, first)
        if isinstance(self.capture, CallCapture) and first and on_model:
            # The mask must have been captured before a probe that was put in front of everything reads it.
            assert self.known is not None
            self.capture.handle.remove()
            self.capture.attach(self.known, first=True)

    def watch_ready(self, place: Site, name: str, first: bool) -> None:
        """Also read tokens that the caller looked up and passes in place of ids."""
        assert self.ready is not None
        assert self.known is not None
        assert isinstance(self.capture, CallCapture)
        argument, i = self.ready[0], self.capture.index[self.ready[0]]

        def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = args[i] if i < len(args) else kwargs.get(argument)
            if tokens is not None:
                self.take(name, place, tokens)

        self.handles.append(self.known.register_forward_pre_hook(on_call, with_kwargs=True, prepend=first))

    def take(self, name: str, place: Site, tensor: Tensor) -> None:
        tokens = place.as_tokens(tensor)
        mask = self.reader(self.capture.values) if self.reader and self.capture else None
        if mask is not None:
            mask = place.token_mask(mask, tokens)
        if name == "tokens":
            self.token_mask = mask
        self.readings[name] = (place.module, read(tokens, mask))

    def fields(self) -> Iterator[dict[str, Any]]:
        for name in self.expected:
            if name not in self.readings:
                raise RuntimeError(f"the site of {name!r} was not reached by this forward")
            path, reading = self.readings[name]
            yield {"site": name, "module": path, **summarise(reading)}

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.capture is not None:
            self.capture.remove()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``.

    >>> from torch import nn
    >>> unwrapped(nn.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
