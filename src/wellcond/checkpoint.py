"""A checkpoint is restored as it was trained: by a file beside it, or the record in a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from wellcond.attach import ConditionHandle, condition_, find_known, refuse_second
from wellcond.hooks import token_hooks
from wellcond.memory import Record, recall, warn_unlike

CONFIG_FILE = "wellcond.json"


def record_of(model: nn.Module) -> Record | None:
    """How ``model`` is conditioned; None if it is not."""
    for hook in token_hooks(model):
        if hook.config is not None:
            assert hook.memory is not None
            return Record(hook.config, hook.site, hook.memory.known)
    return None


def warn_if_forgotten(model: nn.Module) -> None:
    """Warn if ``model`` was loaded from a conditioned Hugging Face checkpoint but is not conditioned (so).

    transformers does not know of wellcond, so ``from_pretrained`` itself is silent. This check runs in `measure`,
    `ConditioningMonitor`, `condition_` (if the options differ), `leak` and `save_config`; call it yourself after
    loading, or load with `restore_`.

    >>> warn_if_forgotten(nn.Linear(2, 2))
    """
    record = record_of(model)
    warn_unlike(model, None if record is None else record.config)


def save_config(model: nn.Module, directory: str | Path) -> Path:
    """Write how ``model`` is conditioned to ``directory/wellcond.json``, beside its checkpoint.

    A Hugging Face model needs it not: its ``save_pretrained`` writes the same record into ``config.json``.

    Raises ValueError if it is not conditioned. Returns the path of the file.
    """
    record = record_of(model)
    if record is None:
        warn_if_forgotten(model)
        raise ValueError(f"this {type(model).__name__} is not conditioned; there is nothing to save")
    path = Path(directory) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record.to_dict(), indent=2) + "\n")
    return path


def restore_(model: nn.Module, directory: str | Path | None = None) -> ConditionHandle:
    """Condition ``model`` the way its checkpoint was.

    Args:
        directory: where `save_config` wrote ``wellcond.json``; None for a Hugging Face model, whose own configuration
            remembers.

    Raises:
        FileNotFoundError: no ``wellcond.json`` there.
        ValueError: the record is not readable, there is none in ``model.config``, it is of another kind of model or
            names a site that this model does not have, or as `condition_`.
    """
    if directory is None:
        record, source = recall(model), "model.config.wellcond"
        if record is None:
            raise ValueError(
                f"this {type(model).__name__} has no record of a conditioning in its configuration: it was not loaded "
                f"from a conditioned Hugging Face checkpoint. If its folder has a {CONFIG_FILE}, call "
                f"wellcond.restore_(model, folder); if it was trained conditioned, wellcond.condition_(model, config)"
            )
    else:
        record, source = _read_record(Path(directory) / CONFIG_FILE), str(Path(directory) / CONFIG_FILE)
    refuse_second(model)
    if record.model is None:
        return condition_(model, record.config, site=record.site.module, layout=record.site.layout)
    kind = type(find_known(model).module).__name__
    if kind != record.model:
        raise ValueError(f"{source} is of a {record.model}, but this {type(model).__name__} holds a {kind}")
    return condition_(model, record.config)


def _read_record(path: Path) -> Record:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: that checkpoint was not saved with wellcond.save_config. A Hugging Face model "
            f"remembers in its config.json: wellcond.restore_(model). If it was trained conditioned, call "
            f"wellcond.condition_(model, config) with the same config"
        )
    try:
        return Record.from_dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} is not a wellcond configuration: {error}") from error
