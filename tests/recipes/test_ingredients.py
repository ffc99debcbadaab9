import pytest
import timm
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from wellcond.recipes import Schedule
from wellcond.recipes.ingredients import decay_groups

STEPS_PER_EPOCH = 7


def of_timm(schedule: Schedule, epochs: int, peak: float) -> list[float]:
    """The rate of every step when timm's own scheduler is stepped as the published scripts do."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scale = 1 if schedule.by_epoch else STEPS_PER_EPOCH
    warmup = round(schedule.warmup_epochs * scale)
    length = round((epochs - schedule.cooldown_epochs) * scale)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=length - warmup if schedule.cosine_from_warmup else length,
        lr_min=schedule.floor,
        warmup_t=warmup,
        warmup_lr_init=schedule.warmup_start,
        warmup_prefix=schedule.cosine_from_warmup,
        cycle_limit=1,
        t_in_epochs=schedule.by_epoch,
    )
    rates = []
    for step in range(epochs * STEPS_PER_EPOCH):
        if not schedule.by_epoch:
            scheduler.step_update(step)
        elif step % STEPS_PER_EPOCH == 0 and step:
            scheduler.step(step // STEPS_PER_EPOCH - schedule.delay)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("cosine_from_warmup", [False, True])
@pytest.mark.parametrize(("cooldown", "delay"), [(0, 0), (2, 0), (0, 1)])
def test_the_schedule_is_that_of_timm(
    by_epoch: bool, cosine_from_warmup: bool, cooldown: int, delay: int
) -> None:
    schedule = Schedule(
        warmup_epochs=3,
        warmup_start=1e-6,
        floor=1e-5,
        by_epoch=by_epoch,
        delay=delay if by_epoch else 0,
        cosine_from_warmup=cosine_from_warmup,
        cooldown_epochs=cooldown,
    )
    steps = 12 * STEPS_PER_EPOCH
    rates = [schedule.rate(step, steps=steps, epochs=12, peak=1e-3) for step in range(steps)]
    assert rates == pytest.approx(of_timm(schedule, 12, 1e-3), rel=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 5, 999])
def test_a_shortened_schedule_has_the_same_shape(steps: int) -> None:
    schedule = Schedule(warmup_epochs=5, warmup_start=1e-6, floor=1e-5)
    rates = [schedule.rate(step, steps=steps, epochs=300, peak=1e-3) for step in range(steps + 1)]
    assert rates[0] == pytest.approx(1e-6)
    assert rates[-1] == pytest.approx(1e-5)
    assert max(rates) <= 1e-3


def names_without_decay(model: nn.Module, exempt: tuple[str, ...]) -> set[str]:
    groups = decay_groups(model, 0.05, exempt)
    free = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    decayed = {id(p) for group in groups if group["weight_decay"] == 0.05 for p in group["params"]}
    assert not free & decayed
    assert free | decayed == {id(p) for p in model.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in free}


def test_biases_norms_and_named_parameters_are_exempt() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    expected = {name for name, p in model.named_parameters() if p.ndim == 1}
    assert names_without_decay(model, ()) == expected
    assert names_without_decay(model, ("pos_embed", "cls_*")) == expected | {"pos_embed", "cls_token"}


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of Linear is named pos_embed"):
        decay_groups(nn.Linear(2, 2), 0.05, ("pos_embed", "*"))
