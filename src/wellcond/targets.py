"""What `wellcond inspect` looks at: a model by its name, folder or function, and a batch of real data for it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PHOTOGRAPHS = "scikit-learn's two sample photographs"
REFERENCE = "pydoc_data.topics, Python's own reference"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model in eval mode and a batch that it can be called with.

    Attributes:
        name: as it was asked for.
        model: the model.
        weights: where its weights come from.
        batch: a tensor, tuple or mapping.
        data: what the batch is, in words.
    """

    name: str
    model: nn.Module
    weights: str
    batch: Any
    data: str


def load(
    target: str,
    *,
    text: Path | None = None,
    images: Path | None = None,
    samples: int = 4,
    length: int = 128,
    pretrained: bool = False,
) -> Subject:
    """The subject that ``target`` names.

    Args:
        target: ``module:function`` that returns a model or ``(model, batch)``; a folder with a Hugging Face
            ``config.json``, or a ``.gguf`` file; otherwise the name of a timm model.
        text: file whose text a language model reads; default Python's own reference.
        images: an image or a folder of images for a vision model; default scikit-learn's photographs.
        samples: sequences or images at most.
        length: tokens per sequence.
        pretrained: load timm's weights, from the network or its cache; otherwise they are random, seed 0.

    Raises:
        ValueError: the target is none of these, or needs a batch that it does not bring.
        FileNotFoundError: a file does not exist.
    """
    if samples < 1 or length < 2:
        raise ValueError(f"need samples ≥ 1 and length ≥ 2, got {samples} and {length}")
    for path in (text, images):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    path = Path(target).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return from_folder(target, path, text, images, samples, length)
    if ":" in target:
        return from_function(target, images, samples)
    return from_timm(target, images, samples, pretrained)


def from_function(target: str, images: Path | None, samples: int) -> Subject:
    """What ``module:function()`` returns; modules beside the caller are found, too."""
    name, _, attribute = target.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target}: {error}; write it as module:function") from error
    returned = function()
    model, batch = returned if isinstance(returned, tuple) else (returned, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} must return a model or (model, batch), got {type(model).__name__}")
    data = f"the batch of {target}"
    if batch is None:
        if not hasattr(model, "pretrained_cfg"):
            raise ValueError(
                f"{target} returned a {type(model).__name__} alone; let it return (model, batch), where the batch is "
                f"what the model is called with"
            )
        batch, data = photographs(model, images, samples)
    return Subject(target, model.eval(), f"as {target} made them", batch, data)


def from_timm(name: str, images: Path | None, samples: int, pretrained: bool) -> Subject:
    """A timm model and photographs at its size."""
    import timm

    if not timm.is_model(name):
        import difflib

        close = difflib.get_close_matches(name, timm.list_models(), n=4)
        raise ValueError(
            f"{name!r} is neither a folder, nor module:function, nor a model of timm"
            + (f"; timm has {', '.join(close)}" if close else "")
        )
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=pretrained).eval()
    weights = "timm's pretrained" if pretrained else "random, seed 0"
    batch, data = photographs(model, images, samples)
    return Subject(name, model, weights, batch, data)


def photographs(model: nn.Module, images: Path | None, samples: int) -> tuple[Tensor, str]:
    """Images as timm prepares them for this model at evaluation, ``(B, 3, H, W)``, and what they are."""
    from PIL import Image

    data_of_timm: Any = importlib.import_module("timm.data")  # whose exports its stubs do not show
    if images is None:
        from sklearn.datasets import load_sample_images

        pictures = [Image.fromarray(array) for array in load_sample_images().images]
        data = PHOTOGRAPHS
    else:
        files = sorted(p for p in images.iterdir() if p.is_file()) if images.is_dir() else [images]
        kinds = set(Image.registered_extensions())
        files = [p for p in files if p.suffix.lower() in kinds]
        if not files:
            raise ValueError(f"no image in {images}")
        pictures = [Image.open(p).convert("RGB") for p in files[:samples]]
        data = str(images)
    settings = data_of_timm.resolve_model_data_config(model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:  # the one it was built with, which may not be that of its pretrained weights
        settings["input_size"] = (3, *size)
    transform: Any = data_of_timm.create_transform(**settings, is_training=False)
    batch = torch.stack([transform(picture) for picture in pictures[:samples]])
    return batch, f"{data}, {len(batch)} at {batch.shape[-2]}×{batch.shape[-1]}"


def from_folder(
    target: str, path: Path, text: Path | None, images: Path | None, samples: int, length: int
) -> Subject:
    """A Hugging Face model from local files only, and what it reads: text, or images for a vision model."""
    import transformers

    options: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        folder, options["gguf_file"] = path.parent, path.name
    elif not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: it is not the folder of a Hugging Face model")
    with quiet_unless_terminal():
        model = transformers.AutoModel.from_pretrained(str(folder), **options).eval()
    if model.main_input_name == "pixel_values":
        batch, data = processed_images(folder, images, samples)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
        batch, data = sequences(tokenizer, text, samples, length, longest(model))
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = batch["input_ids"][:, :2]
    return Subject(target, model, "the checkpoint's", batch, data)


@contextlib.contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """No progress bars of transformers in a file or a pipe."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    bars = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def longest(model: Any) -> int | None:
    """How many tokens a model takes, None where nothing says so."""
    found = getattr(model.config, "max_position_embeddings", None)
    return int(found) if found is not None else None


def sequences(
    tokenizer: Any, text: Path | None, samples: int, length: int, limit: int | None
) -> tuple[dict[str, Tensor], str]:
    """Full sequences of ``length`` tokens, one after another from a text, each with the tokenizer's special tokens."""
    written = text.read_text(encoding="utf-8") if text is not None else reference()
    if limit is not None and length > limit:
        raise ValueError(f"length={length}, but the model takes {limit} tokens")
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot cut a text into sequences; save a fast tokenizer there"
        )
    cut = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
    rows = [
        row for row in tokenizer(written[: 20 * samples * length], **cut)["input_ids"] if len(row) == length
    ]
    rows = rows[:samples]
    if not rows:
        raise ValueError(f"the text has fewer than {length} tokens; pass a smaller length")
    tokens = torch.tensor(rows)
    name = str(text) if text is not None else REFERENCE
    return (
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
        f"{name}: {len(rows)} sequences of {tokens.shape[1]} tokens",
    )


def reference() -> str:
    """465 kB of English that come with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def processed_images(folder: Path, images: Path | None, samples: int) -> tuple[Mapping[str, Tensor], str]:
    """Images as the folder's own processor prepares them."""
    import transformers
    from PIL import Image

    kind: Any = transformers.AutoImageProcessor
    processor = kind.from_pretrained(str(folder), local_files_only=True)
    if images is None:
        from sklearn.datasets import load_sample_images

        pictures = [Image.fromarray(array) for array in load_sample_images().images][:samples]
    else:
        files = sorted(images.iterdir()) if images.is_dir() else [images]
        pictures = [Image.open(p).convert("RGB") for p in files[:samples]]
    batch = dict(processor(pictures, return_tensors="pt"))
    return batch, f"{images or PHOTOGRAPHS}, {len(pictures)} of them"
