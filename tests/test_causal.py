"""What a decoder must keep in every arm that does not leak: prefixes, caches, padding, tied weights, long sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.training.arms import ARMS, Arm, select_arms

LONG = 300  # many times the 16 features, so that the tokens of a whole sequence are of full rank and of a prefix not
HARMLESS = [arm for arm in ARMS if not arm.leaks]


def ids(length: int = LONG, batch: int = 2) -> Tensor:
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def decoder(arm: Arm) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "n_positions": 512, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        model.transformer.wte.weight *= torch.logspace(1, -1, 16)  # tokens matter, unlike at initialisation
    arm.apply_(model, {"input_ids": ids(), "use_cache": False})
    return model


@pytest.fixture(params=HARMLESS, ids=lambda arm: arm.name)
def model(request: pytest.FixtureRequest) -> GPT2LMHeadModel:
    return decoder(request.param)


@torch.no_grad()
def logits(model: GPT2LMHeadModel, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, **options).logits


def test_a_long_sequence_is_predicted_like_its_prefixes(model: GPT2LMHeadModel) -> None:
    whole = logits(model, ids())
    for length in (1, 7, 16, 17, 150, LONG):
        assert torch.allclose(logits(model, ids()[:, :length])[:, -1], whole[:, length - 1], atol=2e-4)
    assert wc.leak(model, ids()) == 0.0


def test_a_cache_gives_the_logits_of_the_long_sequence(model: GPT2LMHeadModel) -> None:
    whole, parts, cache = logits(model, ids()), [], None
    with torch.no_grad():
        for part in ids().split([1, 1, 120, 1, LONG - 123], 1):
            output = model(part, past_key_values=cache, use_cache=True)
            parts.append(output.logits)
            cache = output.past_key_values
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-4)


def test_padding_on_the_left_changes_nothing(model: GPT2LMHeadModel) -> None:
    alone = logits(model, ids(20, 1))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids(20, 1)], 1)
    mask = (torch.arange(25) >= 5).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=positions)
    assert torch.allclose(found[:, 5:], alone, atol=2e-4)


def test_the_head_stays_tied_through_a_step(model: GPT2LMHeadModel) -> None:
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = model.transformer.wte.weight.detach().clone()
    model(ids(40), labels=ids(40)).loss.backward()
    optimizer.step()
    assert not torch.equal(model.transformer.wte.weight, before)
    assert model.lm_head.weight is model.transformer.wte.weight
    whole = logits(model, ids())
    assert torch.allclose(logits(model, ids()[:, :50])[:, -1], whole[:, 49], atol=2e-4)


def test_the_papers_scope_predicts_a_prefix_otherwise() -> None:
    """The fault that the tests above would find."""
    (paper,) = select_arms(["conditioned-paper"])
    model = decoder(paper)
    whole = logits(model, ids(), use_cache=False)
    alone = logits(model, ids()[:, :150], use_cache=False)[:, -1]
    assert (alone - whole[:, 149]).abs().max() > 1e-2
