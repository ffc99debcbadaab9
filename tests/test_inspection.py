"""`wellcond inspect`: a model by name, folder or function; the numbers are those of measure."""

import json
import math

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites import language
from tests.sites.models import MODELS
from wellcond.inspection import examine, inspect
from wellcond.targets import REFERENCE, Subject, load

SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
WORDS = [
    *SPECIAL,
    "the",
    "a",
    "of",
    "to",
    "and",
    "in",
    "is",
    "with",
    "that",
    "for",
    "it",
    "as",
    "by",
    "be",
    "or",
]


@pytest.fixture
def folder(tmp_path):
    """Saves a tiny model with a tokenizer of 19 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep")}

    def save(model: nn.Module):
        model.save_pretrained(tmp_path / "model")
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**language.BUILDERS, **language.CAUSAL}[name]()


def tiny_vit():
    example = MODELS["timm ViT"]
    return example.model(), example.batch()


def vit_alone():
    return MODELS["timm ViT"].model()


def plain_layer():
    return nn.Linear(2, 2)


def nothing():
    return None


def printed(capsys, *args, **options) -> dict:
    assert inspect(*args, json=True, **options) == 0

    def refuse(text):
        raise AssertionError(text)

    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_the_numbers_are_those_of_measure():
    model, batch = tiny_vit()
    found = examine(Subject("vit", model, "random", batch, "noise"))
    before = wc.measure(model.eval(), batch)
    assert not wc.is_conditioned(model)
    wc.condition_(model)
    after = [row for row in wc.measure(model, batch) if not row.site.startswith("conditioned")]
    assert [line.what for line in found.lines[:3]] == ["tokens", "softmax(QKᵀ)V", "softmax(QKᵀ)"]
    assert [line.layer for line in found.lines] == [None, 0, 0, 1, 1]
    assert [line.shape for line in found.lines[:3]] == [(17, 32), (17, 8), (17, 17)]
    for line in found.lines:
        site = {"tokens": "tokens", "softmax(QKᵀ)V": "attention.output", "softmax(QKᵀ)": "attention.weights"}
        for rows, reading in ((before, line.before), (after, line.after)):
            group = [row for row in rows if row.site == site[line.what] and row.layer == line.layer]
            assert line.heads == (None if line.layer is None else len(group))
            assert reading.kappa == pytest.approx(sum(row.kappa for row in group) / len(group), rel=1e-6)
            assert reading.rank == min(row.rank for row in group)
    assert found.lines[0].after.kappa_pinv <= 2.002 < found.lines[0].before.kappa_pinv


def test_windows_have_their_own_shape():
    example = MODELS["timm Swin"]
    found = examine(Subject("swin", example.model().eval(), "random", example.batch(), "noise"))
    assert found.lines[0].shape == (64, 16)
    assert found.lines[1].shape == (16, 8)
    assert found.lines[1].samples == 3 * 4


def test_attention_over_channels_has_a_softmax_of_channels():
    example = MODELS["timm XCiT"]
    found = examine(Subject("xcit", example.model().eval(), "random", example.batch(), "noise"))
    n, d = found.lines[1].shape
    assert n == found.lines[0].shape[0]
    assert found.lines[2].shape == (d, d)
    assert n != d


def test_a_function_of_a_module(capsys):
    found = printed(capsys, "tests.test_inspection:tiny_vit")
    assert found["model"] == "VisionTransformer"
    assert found["rows"][0]["what"] == "tokens"
    assert found["rows"][0]["after"]["kappa_pinv"] <= 2.002
    found = printed(capsys, "tests.test_inspection:vit_alone", samples=1)
    assert found["data"].startswith("scikit-learn's two sample photographs, 1 at 32×32")


def test_a_folder_with_text(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("that is the of it and to be in a with for it as by " * 40)
    found = printed(capsys, folder(build("BERT")), text=tmp_path / "text.txt", length=12, samples=3)
    assert found["data"].endswith("text.txt: 3 sequences of 12 tokens")
    assert found["conditioning"]["scope"] == "sample"
    tokens = found["rows"][0]
    assert (tokens["shape"], tokens["samples"]) == ([12, 32], 3)
    assert tokens["after"]["kappa_pinv"] <= 2.002
    assert len(found["rows"]) == 1 + 2 * 2


def test_the_table_of_a_decoder_comes_first(folder, capsys):
    model = build("Llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(torch.logspace(0, -3, 32))
    found = printed(capsys, folder(model), length=16)
    assert found["data"].startswith(REFERENCE)
    table = found["rows"][0]
    assert (table["what"], table["shape"]) == ("embedding table", [60, 32])
    assert table["before"]["kappa"] > 100
    assert table["after"]["kappa"] <= 2.002
    found = printed(capsys, folder(model), length=16, scope="static")
    assert found["conditioning"]["sigma"] > 0
    assert found["rows"][0]["what"] == "tokens"


@pytest.mark.filterwarnings("error:this .* comes from a checkpoint")
def test_a_conditioned_checkpoint_is_looked_at_as_it_was_trained(folder, capsys):
    model = build("GPT-2")
    wc.condition_(model, wc.ConditioningConfig(scope="static", sigma=3.0))
    path = folder(model)
    found = printed(capsys, path, length=16)
    assert found["conditioning"]["scope"] == "static"
    assert found["conditioning"]["sigma"] == 3.0
    assert printed(capsys, path, length=16, scope="table")["conditioning"]["scope"] == "table"


def test_the_table_on_a_pipe_is_plain_and_names_everything(capsys):
    assert inspect("tests.test_inspection:tiny_vit") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\r" not in text
    for word in ("tokens", "17×32", "17×8 × 4", "scope sample at norm_pre", "κ⁺ after"):
        assert word in text


def test_infinite_numbers_are_shown_and_written(capsys):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

        def forward(self, x):
            return self.encoder(x)

    subject = Subject("constant", Constant().eval(), "random", torch.ones(1, 5, 8), "ones")
    found = examine(subject)
    assert math.isinf(found.lines[0].before.kappa)
    assert found.to_dict()["rows"][0]["before"]["kappa"] == "inf"
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plot_is_written(suffix, tmp_path, capsys):
    path = tmp_path / f"plot.{suffix}"
    inspect("tests.test_inspection:tiny_vit", plot=path)
    assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match="xyz"):
        inspect("tests.test_inspection:tiny_vit", plot=tmp_path / "plot.xyz")


def test_errors_say_what_was_meant(tmp_path, folder):
    with pytest.raises(ValueError, match=r"timm has .*vit_base_patch16_224"):
        load("vit_base_patch16_244")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load("vit_base_patch16_224", text=tmp_path / "missing.txt")
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        load(str(tmp_path / "none.gguf"))
    with pytest.raises(ValueError, match=r"\(model, batch\), got NoneType"):
        load("tests.test_inspection:nothing")
    with pytest.raises(ValueError, match="returned a Linear alone"):
        load("tests.test_inspection:plain_layer")
    for target in ("tests.test_inspection:absent", "no_such_module:f"):
        with pytest.raises(ValueError, match="module:function"):
            load(target)
    with pytest.raises(ValueError, match="samples"):
        load("vit_base_patch16_224", samples=0)
    path = folder(build("BERT"))
    (tmp_path / "short.txt").write_text("the end")
    with pytest.raises(ValueError, match="fewer than 30 tokens"):
        load(path, text=tmp_path / "short.txt", length=30)
    with pytest.raises(ValueError, match="takes 40 tokens"):
        load(path, length=50)
    with pytest.raises(ValueError, match="no image"):
        load("vit_tiny_patch16_224", images=tmp_path)
