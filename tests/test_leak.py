"""Decoders must not see the future, and whoever lets them is told."""

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites import language

LEAKY = wc.ConditioningConfig(scope="sample", allow_leak=True)


def causal(name: str) -> nn.Module:
    torch.manual_seed(0)
    return language.CAUSAL[name]()


@pytest.mark.parametrize("name", sorted(language.CAUSAL))
def test_table_and_static_leak_nothing_and_sample_does(name):
    model, ids = causal(name), language.ids()
    model.train()
    assert wc.leak(model, ids) == 0.0
    for config in (None, wc.ConditioningConfig(scope="static", sigma=2.0)):
        with wc.condition_(model, config) as handle:
            assert wc.leak(model, ids) == 0.0
            assert not handle.leaks
            assert not wc.leaks(model)
    with pytest.raises(ValueError, match="future"):
        wc.condition_(model, wc.ConditioningConfig(scope="sample"))
    assert not wc.is_conditioned(model)
    with wc.condition_(model, LEAKY) as handle:
        assert wc.leak(model, ids) > 1e-2
        assert handle.leaks
        assert wc.leaks(nn.Sequential(model))
    assert not wc.leaks(model)
    assert model.training


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_every_cut_sees_the_leak(cut):
    model, ids = causal("GPT-2"), language.ids()
    assert wc.leak(model, ids, cut=cut) == 0.0
    wc.condition_(model, LEAKY)
    assert wc.leak(model, ids, cut=cut, attention_mask=torch.ones_like(ids)) > 1e-3


def test_encoders_look_both_ways_and_do_not_count_as_leaking():
    torch.manual_seed(0)
    model = language.BUILDERS["BERT"]()
    handle = wc.condition_(model)
    assert handle.config.scope == "sample"
    assert wc.leak(model, language.ids()) > 0
    assert not handle.leaks


@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "ELECTRA"])
def test_an_encoder_configured_as_decoder_is_causal(name):
    import transformers

    torch.manual_seed(0)
    classes = {"BERT": "BertLMHeadModel", "RoBERTa": "RobertaForCausalLM", "ELECTRA": "ElectraForCausalLM"}
    config = language.BUILDERS[name]().config
    config.is_decoder = True
    model = getattr(transformers, classes[name])(config)
    with pytest.raises(ValueError, match="future"):
        wc.condition_(model, wc.ConditioningConfig(scope="sample"))
    assert wc.condition_(model).config.scope == "table"
    assert wc.leak(model, language.ids()) == 0.0


def test_naming_a_site_inside_a_causal_model_does_not_get_around_it():
    model = causal("GPT-2")
    with pytest.raises(ValueError, match="future"):
        wc.condition_(model, wc.ConditioningConfig(scope="sample"), site="transformer.drop")
    with pytest.raises(ValueError, match="name the embedding"):
        wc.condition_(model, site="transformer.drop")
    assert wc.condition_(model, site="transformer.wte").config.scope == "table"


def test_the_sample_scope_refuses_a_cache_that_holds_a_part_of_the_sequence():
    model, ids = causal("GPT-2").eval(), language.ids()
    wc.condition_(model, LEAKY)
    first = model(ids[:, :5], use_cache=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids[:, 5:], past_key_values=cache)


def test_a_call_that_turns_out_causal_is_remembered_as_leaking():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    handle = wc.condition_(model, LEAKY)
    x = torch.randn(2, 5, 8)
    model(x)
    assert not handle.leaks
    model(x, mask=nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
    assert handle.leaks


def test_arguments_are_checked():
    model = causal("GPT-2")
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        wc.leak(model, torch.arange(5))
    with pytest.raises(ValueError, match="cut"):
        wc.leak(model, language.ids(), cut=10)
    with pytest.raises(ValueError, match="no embedding"):
        wc.leak(nn.Linear(4, 4), language.ids())
    with pytest.raises(ValueError, match="logits"):
        wc.leak(nn.Sequential(nn.Embedding(60, 4), nn.Flatten()), language.ids())
