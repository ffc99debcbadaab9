"""Image classification: what is mixed, what is minimised and what is scored."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from wellcond.tasks import ImageClassification, Means, Mixing


def mixed(mixing: Mixing, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    np.random.seed(0)  # noqa: NPY002, timm draws from it
    pixels = torch.arange(4.0)[:, None, None, None].expand(4, 1, 16, 16).contiguous()
    labels = torch.tensor([0, 1, 2, 2])
    images, targets = mixing.mix(pixels, labels, classes=3, **options)
    return pixels, images, targets


def test_mixup_mixes_images_and_labels_by_the_same_share() -> None:
    pixels, images, targets = mixed(Mixing(mixup=0.8), smoothing=0.0)
    assert torch.equal(pixels[:, 0, 0, 0], torch.arange(4.0)), "the caller's images were changed"
    share = targets[0, 0].item()
    assert 0 < share < 1
    expected = share * torch.arange(4.0) + (1 - share) * torch.arange(4.0).flip(0)
    assert torch.allclose(images.mean((1, 2, 3)), expected, atol=1e-5)
    assert torch.allclose(targets[0], torch.tensor([share, 0.0, 1 - share]))


def test_cutmix_pastes_a_box_and_labels_by_its_area() -> None:
    _, images, targets = mixed(Mixing(cutmix=1.0), smoothing=0.0)
    kept = (images[0] == 0).float().mean().item()
    assert 0 < kept < 1
    assert set(images[0].unique().tolist()) == {0.0, 3.0}
    assert targets[0, 0].item() == pytest.approx(kept)


def test_labels_are_smoothed_while_mixing() -> None:
    _, _, targets = mixed(Mixing(mixup=0.8), smoothing=0.3)
    assert targets.min().item() == pytest.approx(0.1)
    assert torch.allclose(targets.sum(1), torch.ones(4))


def test_an_odd_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="mixed in pairs, and a batch has 3"):
        Mixing(mixup=0.8).mix(
            torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long), classes=2, smoothing=0.0
        )


def test_the_loss_is_smoothed_in_training_alone_and_mixed_labels_not_twice() -> None:
    logits, labels = (
        torch.randn(4, 10, generator=torch.Generator().manual_seed(0)),
        torch.tensor([1, 2, 3, 4]),
    )
    task = ImageClassification(label_smoothing=0.3)
    batch = {"labels": labels}
    assert task.loss(logits, batch, training=False) == cross_entropy(logits, labels)
    assert task.loss(logits, batch, training=True) == cross_entropy(logits, labels, label_smoothing=0.3)
    soft = {"labels": torch.nn.functional.one_hot(labels, 10).float()}
    assert task.loss(logits, soft, training=True) == cross_entropy(logits, soft["labels"])


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5)])
def test_scores_do_not_depend_on_how_the_test_set_is_cut(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(7, 10, generator=generator), torch.randint(10, (7,), generator=generator)
    labels[:3] = logits[:3].argmax(-1)
    task = ImageClassification()
    scorer = task.scorer()
    for part, answers in zip(logits.split(sizes), labels.split(sizes), strict=True):
        scorer.update(task.scored(part, {"labels": answers}))
    scores = scorer.compute()
    assert scores["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)
    assert scores["accuracy"] == pytest.approx(100 * (logits.argmax(-1) == labels).float().mean().item())


def test_no_sample_has_no_mean() -> None:
    with pytest.raises(ValueError, match="the test set is empty"):
        Means().compute()
