"""Arms do to a fresh model what their names say."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

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


HARMLESS = [arm for arm in ARMS if not arm.leaks]


@pytest.mark.parametrize("arm", HARMLESS, ids=lambda arm: arm.name)
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


def test_an_arm_that_leaks_is_refused_where_nothing_does(model: torch.nn.Module) -> None:
    (arm,) = select_arms(["conditioned-paper"])
    with pytest.raises(ValueError, match="is not causal, nothing leaks there"):
        arm.apply_(model, batch())


# ------------------------------------------------------------------------------------------- decoders


@pytest.fixture
def decoder() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()


def ids() -> torch.Tensor:
    return torch.randint(40, (4, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_only_the_arm_that_says_so_leaks_on_a_decoder(arm: Arm, decoder: GPT2LMHeadModel) -> None:
    before = weights(decoder)
    plain = decoder(ids()).logits
    arm.apply_(decoder, {"input_ids": ids(), "use_cache": False})
    after = weights(decoder)
    assert after.keys() == before.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == (["transformer.wpe.weight"] if arm.name == "positions" else [])
    assert torch.equal(decoder(ids()).logits, plain) == (arm.name == "baseline")
    found = wc.leak(decoder, ids(), use_cache=False)
    assert found > 1e-3 if arm.leaks else found == 0.0


def test_scopes_of_the_arms_on_a_decoder(decoder: GPT2LMHeadModel) -> None:
    scopes = {"conditioned": "table", "rescaled": "table", "static": "static", "conditioned-paper": "sample"}
    for name, scope in scopes.items():
        select_arms([name])[0].apply_(decoder, {"input_ids": ids(), "use_cache": False})
        assert record_of(decoder).config.scope == scope
        wc.remove_(decoder)
