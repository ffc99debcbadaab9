"""fold_: the same outputs, without wellcond."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites import language
from tests.sites.models import MODELS
from tests.sites.test_contract import outputs, same
from wellcond.attach import find_known

TABLE = wc.ConditioningConfig(scope="table")


def static(placement: str = "input", sigma: float = 2.0) -> wc.ConditioningConfig:
    return wc.ConditioningConfig(scope="static", sigma=sigma, placement=placement)


def causal(name: str) -> nn.Module:
    torch.manual_seed(0)
    return language.CAUSAL[name]().eval()


def close(model: nn.Module, batch, expected) -> bool:
    return all((a - b).abs().max() <= 1e-5 for a, b in zip(outputs(model, batch), expected, strict=True))


@pytest.mark.filterwarnings("ignore:folding the table")
@pytest.mark.parametrize("rescale", ["none", "frobenius"])
@pytest.mark.parametrize("name", sorted(language.CAUSAL))
def test_a_folded_table_gives_the_same_outputs(name, rescale):
    model, batch = causal(name), language.without_cache(language.sentences())
    plain, keys = outputs(model, batch), list(model.state_dict())
    wc.condition_(model, wc.ConditioningConfig(scope="table", rescale=rescale))
    expected = outputs(model, batch)
    assert not same(plain, expected, 1e-3)
    assert wc.fold_(model) is model
    assert not wc.is_conditioned(model)
    assert list(model.state_dict()) == keys
    assert close(model, batch, expected)
    ids = language.ids(5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": language.PAD}
    folded = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    torch.manual_seed(0)
    twin = language.CAUSAL[name]().eval()
    wc.condition_(twin, wc.ConditioningConfig(scope="table", rescale=rescale))
    assert torch.equal(folded, twin.generate(ids, attention_mask=torch.ones_like(ids), **options))


def folds() -> list:
    cases = []
    for name, example in MODELS.items():
        for placement in find_known(example.model()).sites.folds:
            cases.append(pytest.param(example, placement, id=f"{name}-{placement}"))
    return cases


@pytest.mark.parametrize(("example", "placement"), folds())
def test_a_folded_code_gives_the_same_outputs(example, placement):
    model, batch = example.model(), example.batch()
    plain, keys = outputs(model, batch), list(model.state_dict())
    wc.condition_(model, static(placement))
    expected = outputs(model, batch)
    assert not same(plain, expected, 1e-3)
    wc.fold_(model)
    assert not wc.is_conditioned(model)
    assert list(model.state_dict()) == keys
    assert close(model, batch, expected)
    if example.padded is not None:
        twin = example.model()
        wc.condition_(twin, static(placement))
        longer, _ = example.padded(3)
        assert close(model, longer, outputs(twin, longer))


def test_some_models_fold_at_either_placement():
    names = {case.id for case in folds()}
    expected = ("transformers GPT-2-input", "transformers GPT-2-tokens", "transformers RoBERTa-tokens")
    assert names >= {*expected, "timm ViT-input", "timm ViT-tokens", "transformers BART-tokens"}
    assert "transformers BERT-input" not in names


def test_positions_and_left_padding_after_folding():
    """The folded table is looked up by whatever positions the caller passes."""
    model, ids = causal("GPT-2"), language.ids(6)
    wc.condition_(model, static())
    call = {"input_ids": ids, "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3]]), "use_cache": False}
    expected = outputs(model, call)
    wc.fold_(model)
    assert close(model, call, expected)


def test_folding_a_tied_table_unties_it_and_says_so(tmp_path):
    import transformers

    model, batch = causal("GPT-2"), language.without_cache(language.sentences())
    wc.condition_(model)
    expected, table = outputs(model, batch), model.transformer.wte.weight
    with pytest.warns(UserWarning, match=r"untied it from \['lm_head.weight'\]"):
        wc.fold_(model)
    assert torch.equal(model.lm_head.weight, table)
    assert model.config.tie_word_embeddings is False
    assert not hasattr(model.config, "wellcond")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert close(loaded, batch, expected)
    wc.warn_if_forgotten(loaded)


def test_a_table_shared_by_encoder_and_decoder_survives_saving(tmp_path):
    import transformers

    torch.manual_seed(0)
    model, batch = language.BUILDERS["T5"]().eval(), language.with_decoder(language.sentences())
    wc.condition_(model, TABLE)
    expected = outputs(model, batch)
    with pytest.warns(UserWarning, match="untied"):
        wc.fold_(model)
    assert close(model, batch, expected)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert close(loaded, batch, expected)


def test_a_table_that_is_not_tied_folds_in_silence(recwarn):
    model = causal("Qwen3")
    assert not model.config.tie_word_embeddings
    head = model.lm_head.weight.detach().clone()
    wc.condition_(model)
    wc.fold_(model)
    assert torch.equal(model.lm_head.weight, head)
    assert not [w for w in recwarn if "untied" in str(w.message)]


@pytest.mark.filterwarnings("ignore:folding the table")
def test_the_folded_model_needs_no_wellcond(tmp_path):
    model, ids = causal("GPT-2"), language.ids(4)
    wc.condition_(model)
    wc.fold_(model)
    assert b"wellcond" not in pickle.dumps(model)
    torch.save((model, ids, model(ids, use_cache=False).logits.detach()), tmp_path / "folded.pt")
    program = (
        "import sys; sys.modules['wellcond'] = None\n"
        "import torch\n"
        f"model, ids, expected = torch.load({str(tmp_path / 'folded.pt')!r}, weights_only=False)\n"
        "assert torch.allclose(model(ids, use_cache=False).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_cannot_be_folded_says_why():
    model = language.BUILDERS["BERT"]()
    with pytest.raises(ValueError, match="condition_"):
        wc.fold_(model)
    with wc.condition_(model), pytest.raises(ValueError, match="scope='sample' computes"):
        wc.fold_(model)
    with wc.condition_(model, static()), pytest.raises(ValueError, match=r"it can at placement=\['tokens'\]"):
        wc.fold_(model)
    with wc.condition_(model, wc.ConditioningConfig(scope="static", placement="tokens")):
        with pytest.raises(ValueError, match="calibrate_"):
            wc.fold_(model)
        assert wc.is_conditioned(model)
    for model in (causal("Llama"), MODELS["timm Swin"].model()):
        with wc.condition_(model, static()), pytest.raises(ValueError, match="no position embedding"):
            wc.fold_(model)
    model = nn.Sequential(nn.Identity())
    with wc.condition_(model, static(), site="0"), pytest.raises(ValueError, match="no position embedding"):
        wc.fold_(model)
