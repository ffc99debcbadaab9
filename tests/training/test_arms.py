"""Arms do to a fresh model what their names say."""

import pytest
import torch

import wellcond as wc
from tests.training.tiny import tiny_data, tiny_model, weights
from wellcond.checkpoint import record_of
from wellcond.training.arms import ARMS, Arm, select_arms


def batch() -> torch.Tensor:
    return tiny_data().train.pixels[:16]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return tiny_model().eval()


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_trains_the_same_parameters(arm: Arm, model: torch.nn.Module) -> None:
    before = weights(model)
    arm.apply_(model, batch())
    after = weights(model)
    assert after.keys() == before.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == (["pos_embed"] if arm.name == "positions" else [])
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "placement", "rescale", "scope"),
    [
        ("conditioned", "input", "none", "sample"),
        ("conditioned-tokens", "tokens", "none", "sample"),
        ("rescaled", "input", "frobenius", "sample"),
        ("static", "input", "none", "static"),
    ],
)
def test_conditioned_arms_have_their_options(
    name: str, placement: str, rescale: str, scope: str, model: torch.nn.Module
) -> None:
    select_arms([name])[0].apply_(model, batch())
    assert wc.is_conditioned(model)
    (before, after) = (
        row for row in wc.measure(model, batch()) if row.site in ("conditioned.before", "conditioned.after")
    )
    assert after.kappa_pinv < before.kappa_pinv
    config = record_of(model).config
    assert (config.placement, config.rescale, config.scope) == (placement, rescale, scope)
    assert (config.sigma is not None) == (scope == "static")


def test_baseline_is_the_model_as_it_is(model: torch.nn.Module) -> None:
    expected = model(batch())
    select_arms(["baseline"])[0].apply_(model, batch())
    assert torch.equal(model(batch()), expected)
    assert not wc.is_conditioned(model)


def test_scaled_keeps_the_condition_number(model: torch.nn.Module) -> None:
    before = wc.measure(model, batch())[0]
    select_arms(["scaled"])[0].apply_(model, batch())
    rows = {row.site: row for row in wc.measure(model, batch())}
    assert rows["tokens"].kappa_pinv == pytest.approx(before.kappa_pinv, rel=1e-4)
    assert rows["tokens"].sigma_max > before.sigma_max


def test_names_that_are_not_there_or_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown arms \\['bseline'\\]; choose among baseline"):
        select_arms(["baseline", "bseline"])
    with pytest.raises(ValueError, match="named twice: scaled"):
        select_arms(["scaled", "baseline", "scaled"])
    with pytest.raises(ValueError, match="choose among"):
        select_arms([])


def test_the_order_is_that_asked_for() -> None:
    assert [arm.name for arm in select_arms(["scaled", "baseline"])] == ["scaled", "baseline"]


def test_no_arm_is_said_to_leak_on_images() -> None:
    assert not any(arm.leaks for arm in ARMS)
