"""A checkpoint remembers that it was trained conditioned, and one that is used without is noticed."""

import json
import warnings

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites import language
from tests.sites.models import MODELS
from wellcond.memory import recall

CONFIGS = {
    "sample": wc.ConditioningConfig(scope="sample", rescale="frobenius", allow_leak=True),
    "table": wc.ConditioningConfig(scope="table", rescale="frobenius"),
    "static": wc.ConditioningConfig(scope="static", strength=2.0, sigma=1.5),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**language.BUILDERS, **language.CAUSAL}[name]().eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**language.sentences()).logits


def silent(*calls) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            call()


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
@pytest.mark.parametrize("scope", CONFIGS)
def test_save_pretrained_then_restore(name, scope, tmp_path):
    """Clean keys, the record in config.json, and a loaded model that is conditioned again to the bit."""
    model = build(name)
    plain, keys = logits(model), set(model.state_dict())
    handle = wc.condition_(model, CONFIGS[scope])
    expected = logits(model)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["wellcond"]
    assert record["config"] == CONFIGS[scope].to_dict()

    loaded = type(model).from_pretrained(tmp_path).eval()
    assert set(loaded.state_dict()) == keys
    assert torch.equal(logits(loaded), plain)
    restored = wc.restore_(loaded)
    assert restored.config == handle.config
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("name", ["timm ViT", "timm Swin", "timm XCiT", "torch TransformerEncoder"])
@pytest.mark.parametrize("scope", ["sample", "static"])
def test_save_config_then_restore(name, scope, tmp_path):
    model, batch = MODELS[name].model().eval(), MODELS[name].batch()
    wc.condition_(model, CONFIGS[scope])
    expected = model(*batch)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert wc.save_config(model, tmp_path / "folder") == tmp_path / "folder" / "wellcond.json"
    twin = MODELS[name].build().eval()
    twin.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert wc.restore_(twin, tmp_path / "folder").config == CONFIGS[scope]
    assert torch.equal(twin(*batch), expected)


def test_a_site_of_the_callers_own_is_restored(tmp_path):
    def model() -> nn.Module:
        return nn.Sequential(nn.Identity(), nn.Flatten())

    grid = torch.rand(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))
    first, second = model(), model()
    wc.condition_(first, site="0", layout="NCHW")
    wc.save_config(first, tmp_path)
    assert wc.restore_(second, str(tmp_path)).sites[0].layout == "NCHW"
    assert torch.equal(first(grid), second(grid))
    with pytest.raises(ValueError, match="no submodule '0'"):
        wc.restore_(nn.ModuleDict({"a": nn.Linear(2, 2)}), tmp_path)


def test_the_chosen_scope_and_the_calibrated_sigma_are_remembered(tmp_path):
    model = build("GPT-2")
    wc.condition_(model)
    assert model.config.wellcond["config"]["scope"] == "table"
    wc.remove_(model)
    assert not hasattr(model.config, "wellcond")
    wc.condition_(model, wc.ConditioningConfig(scope="static"))
    sigma = wc.calibrate_(model, [language.sentences()])
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert wc.restore_(loaded).config.sigma == sigma
    assert torch.equal(logits(loaded), expected)


@pytest.fixture
def forgotten(tmp_path) -> nn.Module:
    """A model loaded from a conditioned checkpoint by someone who does not know."""
    model = build("GPT-2")
    wc.condition_(model, CONFIGS["table"])
    model.save_pretrained(tmp_path)
    return type(model).from_pretrained(tmp_path).eval()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: wc.warn_if_forgotten(model),
        lambda model: wc.warn_if_forgotten(nn.Sequential(model)),
        lambda model: wc.measure(model, language.sentences()),
        lambda model: wc.leak(model, language.ids()),
        lambda model: wc.condition_(model),
        lambda model: wc.ConditioningMonitor(model, every=1).after_step(1, language.sentences()),
    ],
    ids=["check", "inside", "measure", "leak", "conditioned otherwise", "monitor"],
)
def test_using_it_without_is_noticed_and_the_mend_named(forgotten, use):
    with pytest.warns(UserWarning, match=r"trained conditioned.*restore_\(model\).*remove_\(model\)"):
        use(forgotten)


def test_each_mend_makes_it_silent(forgotten):
    silent(
        lambda: wc.restore_(forgotten),
        lambda: wc.warn_if_forgotten(forgotten),
        lambda: wc.measure(forgotten, language.sentences()),
        lambda: wc.remove_(forgotten),
        lambda: wc.measure(forgotten, language.sentences()),
    )
    assert recall(forgotten) is None


def test_conditioning_as_recorded_is_silent(forgotten):
    silent(lambda: wc.condition_(forgotten, CONFIGS["table"]), lambda: wc.warn_if_forgotten(forgotten))


def test_the_inner_and_the_outer_model_share_one_memory(tmp_path):
    """Saved from BertForMaskedLM, restored into a bare BertModel, and the other way round."""
    import transformers

    model = build("BERT")
    wc.condition_(model)
    model.save_pretrained(tmp_path / "outer")
    model.bert.save_pretrained(tmp_path / "inner")
    for kind in (transformers.BertModel, transformers.BertForSequenceClassification):
        for folder in ("outer", "inner"):
            loaded = kind.from_pretrained(tmp_path / folder)
            assert wc.restore_(loaded).config.scope == "sample"


def test_an_encoder_keeps_its_own_memory(tmp_path):
    """T5's encoder has a configuration of its own."""
    model = build("T5")
    wc.condition_(model)
    assert model.config.wellcond == model.encoder.config.wellcond
    assert not hasattr(model.decoder.config, "wellcond")
    wc.remove_(model)
    assert not hasattr(model.encoder.config, "wellcond")


def test_a_copy_has_a_memory_of_its_own():
    import copy

    model = build("GPT-2")
    wc.condition_(model)
    twin = copy.deepcopy(model)
    wc.remove_(twin)
    assert hasattr(model.config, "wellcond")
    assert not hasattr(twin.config, "wellcond")
    wc.condition_(twin, CONFIGS["static"])
    assert twin.config.wellcond["config"]["scope"] == "static"
    assert model.config.wellcond["config"]["scope"] == "table"


def test_a_conditioned_model_generates_from_a_saved_folder(tmp_path):
    """Generation configurations, derived from config.json, do not stumble over the record."""
    model = build("GPT-2")
    wc.condition_(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    wc.restore_(loaded)
    ids = language.ids(4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


def test_errors_name_the_file_and_the_mend(tmp_path):
    model = MODELS["timm ViT"].model()
    with pytest.raises(ValueError, match="not conditioned"):
        wc.save_config(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"wellcond\.condition_"):
        wc.restore_(model, tmp_path)
    with pytest.raises(ValueError, match="no record"):
        wc.restore_(model)
    path = tmp_path / "wellcond.json"
    for text in ("{", "[]", '{"config": {}}', '{"config": {"scope": "galaxy"}, "site": {"module": ""}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"wellcond\.json"):
            wc.restore_(model, tmp_path)
    wc.condition_(model)
    wc.save_config(model, tmp_path)
    with pytest.raises(ValueError, match="already"):
        wc.restore_(model, tmp_path)
    with pytest.raises(ValueError, match="is of a VisionTransformer, but this Xcit holds a Xcit"):
        wc.restore_(MODELS["timm XCiT"].model(), tmp_path)
