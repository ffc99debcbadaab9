"""Fine-tuning: GLUE's eight tasks, and pairs of glosses from WordNet for machines without a network.

Sources: [cramming] https://github.com/JonasGeiping/cramming, in its folder cramming/config the files
eval/GLUE_sane.yaml and eval/optim/adam.yaml.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.data import Split
from wellcond.data.glue import GLUE, GlueTask, glue_folder, glue_hub
from wellcond.data.sentences import Example, Sentences
from wellcond.data.wordnet import INSTALL, WORDNET_FOLDER, gloss_pairs
from wellcond.data.wordpiece import digest
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Recipe, Source
from wellcond.tasks.glue import SentenceTask

DROPOUT = (
    0.1  # [cramming] arch/crammed-bert.yaml: hidden, attention and classifier dropout; pretraining has none
)
LENGTH = 128  # [cramming] max_seq_length

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_in(folder: Path) -> Path:
    """The folder itself if it holds a model, or its newest ``checkpoint-STEP``, also below ``checkpoints``.

    Raises:
        FileNotFoundError: there is neither.
    """
    if (folder / "config.json").is_file():
        return folder
    found = [
        (int(name[1]), path)
        for place in (folder, folder / "checkpoints")
        for path in (place.iterdir() if place.is_dir() else ())
        if (name := CHECKPOINT.fullmatch(path.name)) and (path / "config.json").is_file()
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds neither a model of transformers (config.json) nor checkpoint-STEP folders of a training"
        )
    return max(found)[1]


def classifier(folder: Path, classes: int) -> nn.Module:
    """A pretrained encoder with a fresh classification head; its weights come from torch's random state."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    import wellcond.models.crammed_bert  # noqa: F401, lets the Auto classes know it

    kind = AutoConfig.from_pretrained(str(folder)).model_type
    # A crammed BERT is saved as it was pretrained, without dropout; others say what they are fine-tuned with.
    dropout: dict[str, float] = {}
    if kind == "crammed_bert":
        dropout = {
            "hidden_dropout_prob": DROPOUT,
            "attention_probs_dropout_prob": DROPOUT,
            "classifier_dropout": DROPOUT,
        }
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        str(folder), num_labels=classes, **dropout
    )
    return model


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer beside a model; FileNotFoundError if there is none."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} holds a model, but no tokenizer.json: save its tokenizer there")
    return AutoTokenizer.from_pretrained(str(folder))


def sentence_split(
    train: Sequence[Example],
    validation: Mapping[str, Sequence[Example]],
    tokenizer: Any,
    *,
    length: int,
    regression: bool = False,
) -> Split:
    """Tokenised examples; all validation parts in one set, each sample with the number of its part."""
    together = [example for part in validation.values() for example in part]
    parts = [number for number, part in enumerate(validation.values()) for _ in part]
    training = Sentences(train, tokenizer, length=length, regression=regression)
    test = Sentences(together, tokenizer, length=length, regression=regression, parts=parts)
    details = {
        "vocabulary": digest(tokenizer),
        "train": len(training),
        "validation": {name: len(part) for name, part in validation.items()},
        "truncated": training.truncated + test.truncated,
    }
    return Split(training, test, details, tokenizer)


def not_pretrained(name: str) -> Any:
    """Raises ValueError: the recipe needs a model to start from."""
    raise ValueError(
        f"recipe {name!r} fine-tunes a pretrained model: name its folder by --pretrained, such as "
        f"--pretrained runs/weights/{{arm}}/{{seed}}"
    )


def started(recipe: Recipe, reader: Any, folder: Path) -> Recipe:
    """The recipe on the model and the tokenizer in ``folder``; ``reader(tokenizer, source)`` reads the data."""
    assert isinstance(recipe.task, SentenceTask)
    place = checkpoint_in(folder)
    tokenizer = tokenizer_in(place)
    return dataclasses.replace(
        recipe,
        model=partial(classifier, place, recipe.task.classes),
        data=partial(reader, tokenizer, Source()),
        read=partial(reader, tokenizer),
        task=dataclasses.replace(recipe.task, pad=tokenizer.pad_token_id),
    )


def read_glue(task: GlueTask, tokenizer: Any, source: Source) -> Split:
    """A task of GLUE from a folder, or from the hub without one."""
    if source.folder is None:
        data = glue_hub(task)
    else:
        if source.hub:
            raise ValueError("give a folder by --data-dir or say --hub, not both")
        data = glue_folder(task, source.folder, corrupt=source.corrupt)
    return sentence_split(data.train, data.validation, tokenizer, length=LENGTH, regression=task.regression)


def glue_task(task: GlueTask) -> SentenceTask:
    """How a task of GLUE is scored."""
    several = len(task.parts) > 1
    return SentenceTask(
        classes=1 if task.regression else len(task.classes),
        metrics=task.metrics,
        parts=tuple(name.removeprefix("validation_") if several else "" for name in task.parts),
    )


def glue_recipe(task: GlueTask) -> Recipe:
    """One task of GLUE, with the settings that [cramming] has for all of them."""
    recipe = Recipe(
        name=f"glue-{task.name}",
        title=f"GLUE's {task.title}, fine-tuned",
        model=partial(not_pretrained, f"glue-{task.name}"),
        data=partial(not_pretrained, f"glue-{task.name}"),
        task=glue_task(task),
        epochs=5,
        batch_size=16,
        learning_rate=4e-5,
        betas=(0.9, 0.98),
        epsilon=1e-6,
        weight_decay=0.0,
        warmup_share=0.1,  # [cramming] warmup_steps, then cosine-decay to 0
        max_gradient_norm=None,
        drop_last=True,
        mixed_precision=True,
        evaluations=5,
        measurements=5,
        evaluation_batch=128,
        arms=WITHOUT_POSITIONS,
        cost="not measured; minutes to hours on a GPU",
    )
    return dataclasses.replace(recipe, pretrained=partial(started, recipe, partial(read_glue, task)))


PAIRS = {"train": 6000, "validation": 1500}


def read_gloss_pairs(tokenizer: Any, source: Source) -> Split:
    """Pairs of glosses from WordNet's files."""
    source.require_plain_folder()
    train, validation = gloss_pairs(source.folder or WORDNET_FOLDER, **PAIRS)
    return sentence_split(train, {"validation": validation}, tokenizer, length=64)


GLOSS_PAIRS = Recipe(
    name="gloss-pairs",
    title="Is the second gloss what the first is a kind of? WordNet, fine-tuned",
    model=partial(not_pretrained, "gloss-pairs"),
    data=partial(not_pretrained, "gloss-pairs"),
    task=SentenceTask(classes=2),
    epochs=5,
    batch_size=16,
    learning_rate=5e-4,
    betas=(0.9, 0.98),
    epsilon=1e-6,
    weight_decay=0.0,
    warmup_share=0.1,
    max_gradient_norm=1.0,
    evaluations=5,
    measurements=5,
    evaluation_batch=128,
    arms=WITHOUT_POSITIONS,
    cost=f"about 1 min of one CPU core. {INSTALL}",
)
GLOSS_PAIRS = dataclasses.replace(GLOSS_PAIRS, pretrained=partial(started, GLOSS_PAIRS, read_gloss_pairs))

FINE_TUNING = (*(glue_recipe(task) for task in GLUE.values()), GLOSS_PAIRS)
