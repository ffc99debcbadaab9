"""A checkpoint remembers: the record of a conditioning, in a file beside it and in a Hugging Face ``config.json``.

``save_pretrained`` writes every attribute of ``model.config``, and ``from_pretrained`` reads unknown ones back, so the
attribute ``config.wellcond`` travels with the weights. transformers itself does not look at it.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from torch import nn

from wellcond.config import ConditioningConfig
from wellcond.sites import Site

ATTRIBUTE = "wellcond"


@dataclasses.dataclass(frozen=True)
class Record:
    """How a model is conditioned.

    Attributes:
        config: the options, with the scope that was chosen.
        site: where; the path is relative to the model that was attached to.
        model: class of the known model that the site was found by; None where the caller named the site.
    """

    config: ConditioningConfig
    site: Site
    model: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "config": self.config.to_dict(),
            "site": dataclasses.asdict(self.site),
            "model": self.model,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Record:
        """What `to_dict` wrote; ValueError where it is something else."""
        try:
            return cls(
                ConditioningConfig.from_dict(record["config"]), Site(**record["site"]), record.get("model")
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a conditioning: {record!r} ({error!r})") from error


class Memory:
    """The Hugging Face configurations of a model that must tell of its conditioning."""

    def __init__(self, model: nn.Module, site: Site, known: str | None) -> None:
        self.site = site
        self.known = known
        self.configs: list[Any] = []
        for path, module in model.named_modules():
            holds_site = not path or site.module == path or site.module.startswith(path + ".")
            config = pretrained_config(module)
            if holds_site and config is not None and not any(config is other for other in self.configs):
                self.configs.append(config)

    def write(self, config: ConditioningConfig) -> None:
        """Enter the record in every configuration."""
        for holder in self.configs:
            setattr(holder, ATTRIBUTE, Record(config, self.site, self.known).to_dict())

    def erase(self) -> None:
        """Take it out again."""
        for holder in self.configs:
            if hasattr(holder, ATTRIBUTE):
                delattr(holder, ATTRIBUTE)


def pretrained_config(module: nn.Module) -> Any | None:
    """The configuration that ``module.save_pretrained`` would write; None for a module that has none."""
    config = getattr(module, "config", None)
    is_pretrained = hasattr(module, "save_pretrained") and hasattr(config, "to_json_string")
    return config if is_pretrained else None


def recall(model: nn.Module) -> Record | None:
    """The record in the Hugging Face configuration of ``model`` or of a model inside it; None if there is none."""
    for module in model.modules():
        record = getattr(pretrained_config(module), ATTRIBUTE, None)
        if record is not None:
            return Record.from_dict(record)
    return None


def forget(model: nn.Module) -> None:
    """Take the record out of every configuration inside ``model``."""
    for module in model.modules():
        config = pretrained_config(module)
        if config is not None and hasattr(config, ATTRIBUTE):
            delattr(config, ATTRIBUTE)


def warn_unlike(model: nn.Module, config: ConditioningConfig | None) -> None:
    """Warn where the checkpoint of ``model`` was trained otherwise than with ``config`` (None: not conditioned)."""
    record = recall(model)
    if record is None or record.config == config:
        return
    now = "without conditioning" if config is None else f"with {config}"
    warnings.warn(
        f"this {type(model).__name__} comes from a checkpoint that was trained conditioned, {record.config}, but is "
        f"now used {now}: its outputs are not those it was trained for. Call wellcond.restore_(model) to condition it "
        f"as it was, or wellcond.remove_(model) to say that you mean it",
        stacklevel=3,
    )
