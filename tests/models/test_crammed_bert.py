"""Crammed BERT: the architecture as published, sparse prediction, padding, saving, measuring."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import wellcond as wc
from wellcond.models.crammed_bert import (
    CrammedBertConfig,
    CrammedBertForMaskedLM,
    CrammedBertForSequenceClassification,
    CrammedBertModel,
    ScaledSinusoids,
    sinusoids,
)

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
    "classifier_size": 16,
    "initializer_range": 0.2,
}


def small(kind: type[Any] = CrammedBertForMaskedLM, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return kind(CrammedBertConfig(**{**SMALL, **changes})).eval()


def ids(n: int = 12, batch: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(5, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def masked_labels(tokens: Tensor, share: float = 0.25, seed: int = 2) -> Tensor:
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < share
    chosen[0, 0] = True
    return torch.where(chosen, tokens, -100)


@pytest.fixture(scope="module")
def full() -> CrammedBertForMaskedLM:
    """The published architecture, without memory behind its parameters."""
    with torch.device("meta"):
        return CrammedBertForMaskedLM(CrammedBertConfig())


def test_the_defaults_are_the_published_architecture(full: CrammedBertForMaskedLM) -> None:
    encoder = full.encoder
    assert len(encoder.layers) == 16
    layer = encoder.layers[0]
    assert layer.attention.heads == 12
    assert layer.attention.query_key_value.weight.shape == (3 * 768, 768)
    # 3072 is before gating: half of it is multiplied with GELU of the other half.
    assert layer.feed_forward.dense_in.weight.shape == (3072, 768)
    assert layer.feed_forward.dense_out.weight.shape == (768, 1536)
    assert encoder.embeddings.word_embeddings.weight.shape == (32768, 768)
    assert encoder.embeddings.positions.table.shape == (128, 768)
    assert isinstance(encoder.embeddings.norm, nn.LayerNorm)
    assert isinstance(encoder.final_norm, nn.LayerNorm)
    assert {m.eps for m in full.modules() if isinstance(m, nn.LayerNorm)} == {1e-12}
    assert full.config._attn_implementation == "sdpa"
    dropouts = [m.p for m in full.modules() if isinstance(m, nn.Dropout)]
    assert set(dropouts) == {0.0}
    assert full.config.attention_probs_dropout_prob == 0.0


def test_no_linear_map_of_the_encoder_has_a_bias(full: CrammedBertForMaskedLM) -> None:
    linear = [m for m in full.modules() if isinstance(m, nn.Linear)]
    assert len(linear) == 16 * 4 + 1
    assert all(m.bias is None for m in linear)
    with torch.device("meta"):
        classifier = CrammedBertForSequenceClassification(CrammedBertConfig(num_labels=3))
    assert classifier.pooler.weight.shape == (1024, 768)
    assert classifier.classifier.weight.shape == (3, 1024)


def test_the_number_of_parameters(full: CrammedBertForMaskedLM) -> None:
    width, inner = 768, 3072
    block = 3 * width**2 + width**2 + width * inner + width * inner // 2 + 4 * width
    expected = 32768 * width + 1 + 2 * width + 16 * block + 2 * width
    # The decoder is the token embedding and counts once.
    assert sum(p.numel() for p in full.parameters()) == expected == 119_589_889


def test_the_beginning() -> None:
    """Every matrix has standard deviation 0.02, but for the row of the padding token; positions have 1/√d."""
    torch.manual_seed(0)
    model = CrammedBertForMaskedLM(CrammedBertConfig(num_hidden_layers=1))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.02), name
            assert abs(p.mean().item()) < 2e-4, name
    assert not model.encoder.embeddings.word_embeddings.weight[0].any()
    assert model.encoder.embeddings.positions.scale.item() == pytest.approx(768**-0.5)


def test_the_sinusoids_are_those_of_the_formula() -> None:
    table = sinusoids(7, 6)
    for n in range(7):
        for i in range(3):
            angle = torch.tensor(n / 10000 ** (2 * i / 6), dtype=torch.float64)
            assert table[n, 2 * i].item() == pytest.approx(angle.sin().item(), abs=1e-7)
            assert table[n, 2 * i + 1].item() == pytest.approx(angle.cos().item(), abs=1e-7)


def by_hand(model: CrammedBertModel, tokens: Tensor) -> Tensor:
    """The encoder written out once more, in float64, one head at a time."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    size = width // heads

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["embeddings.word_embeddings.weight"][tokens]
    x = norm(
        x + p["embeddings.positions.scale"] * sinusoids(tokens.shape[1], width).double(), "embeddings.norm"
    )
    for i in range(model.config.num_hidden_layers):
        y = (
            norm(x, f"layers.{i}.attention_norm")
            @ p[f"layers.{i}.attention.query_key_value.weight"].double().mT
        )
        q, k, v = y.split(width, -1)
        out = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            weights = (q[..., part] @ k[..., part].mT / size**0.5).softmax(-1)
            out.append(weights @ v[..., part])
        x = x + torch.cat(out, -1) @ p[f"layers.{i}.attention.output.weight"].mT
        y = norm(x, f"layers.{i}.feed_forward_norm") @ p[f"layers.{i}.feed_forward.dense_in.weight"].mT
        value, gate = y.chunk(2, -1)
        gelu = gate * (1 + torch.erf(gate / 2**0.5)) / 2
        x = x + (gelu * value) @ p[f"layers.{i}.feed_forward.dense_out.weight"].mT
    return norm(x, "final_norm")


def test_the_encoder_computes_what_the_formulas_say() -> None:
    model = small(CrammedBertModel)
    tokens = ids()
    with torch.no_grad():
        found = model(tokens).last_hidden_state
    torch.testing.assert_close(found.double(), by_hand(model, tokens), rtol=1e-4, atol=1e-5)


def test_attention_by_softmax_and_by_sdpa_agree() -> None:
    tokens, mask = ids(), torch.ones(3, 12, dtype=torch.long)
    mask[1, 8:] = 0
    outputs = []
    for name in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = CrammedBertConfig(**SMALL, attn_implementation=name)
        with torch.no_grad():
            outputs.append(CrammedBertForMaskedLM(config).eval()(tokens, mask).logits[mask.bool()])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_sparse_prediction_is_dense_prediction_at_the_masked_positions(share: float, seed: int) -> None:
    """Loss, scores and gradients."""
    model, tokens = small(seed=seed), ids(seed=seed + 10)
    labels = masked_labels(tokens, share, seed)
    sparse = model(tokens, labels=labels)
    sparse.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    dense = model(tokens).logits
    loss = functional.cross_entropy(dense.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    torch.testing.assert_close(sparse.logits, dense[labels != -100], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.loss, loss, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_to_predict_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"labels of shape \(3, 12\) have no position to predict"):
        small()(ids(), labels=torch.full((3, 12), -100))


@pytest.mark.parametrize("kind", [CrammedBertForMaskedLM, CrammedBertForSequenceClassification])
@pytest.mark.parametrize(
    "config",
    [
        None,
        wc.ConditioningConfig(),
        wc.ConditioningConfig(rescale="frobenius"),
        wc.ConditioningConfig(placement="tokens"),
        wc.ConditioningConfig(scope="table"),
    ],
    ids=["plain", "conditioned", "rescaled", "tokens", "table"],
)
def test_padding_does_not_change_real_tokens(kind: type[Any], config: wc.ConditioningConfig | None) -> None:
    """Neither the number of padding tokens nor what stands there; conditioned or not."""
    model, tokens = small(kind), ids(9)
    if config is not None:
        wc.condition_(model, config)
    with torch.no_grad():
        expected = model(tokens).logits
        for extra, filler in ((1, 0), (7, 0), (7, 33)):
            padded = functional.pad(tokens, (0, extra), value=filler)
            mask = functional.pad(torch.ones_like(tokens), (0, extra))
            found = model(padded, mask).logits
            if kind is CrammedBertForMaskedLM:
                found = found[:, :9]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [CrammedBertForMaskedLM, CrammedBertForSequenceClassification])
def test_saved_and_loaded_it_is_the_same(kind: type[Any], tmp_path: Path) -> None:
    model, tokens = small(kind, num_labels=3), ids()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    auto = AutoModelForMaskedLM if kind is CrammedBertForMaskedLM else AutoModelForSequenceClassification
    for loaded in (kind.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        assert type(loaded) is kind
        names = [name for name in CrammedBertConfig.__annotations__ if name != "model_type"]
        assert all(getattr(loaded.config, name) == getattr(model.config, name) for name in names)
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


def test_the_decoder_stays_the_token_embedding(tmp_path: Path) -> None:
    """One parameter, in memory, after loading and after a step; and once in the file."""
    model = small()
    model.save_pretrained(tmp_path)
    loaded = CrammedBertForMaskedLM.from_pretrained(tmp_path)
    for made in (model, loaded):
        assert made.decoder.weight is made.encoder.embeddings.word_embeddings.weight
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "decoder.weight" not in file.keys()  # noqa: SIM118
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded(ids(), labels=masked_labels(ids())).loss.backward()
    optimizer.step()
    assert torch.equal(loaded.decoder.weight, loaded.encoder.embeddings.word_embeddings.weight)


def test_fine_tuning_starts_from_the_pretrained_encoder(tmp_path: Path) -> None:
    """The head is new, everything else is loaded; dropout may be switched on for it."""
    pretrained = small()
    pretrained.save_pretrained(tmp_path)
    model, report = CrammedBertForSequenceClassification.from_pretrained(
        tmp_path, num_labels=2, hidden_dropout_prob=0.1, output_loading_info=True
    )
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"pooler", "classifier"}
    assert model.encoder.layers[0].dropout.p == 0.1
    encoder = pretrained.encoder.state_dict()
    assert all(torch.equal(value, encoder[name]) for name, value in model.encoder.state_dict().items())
    assert isinstance(AutoModel.from_pretrained(tmp_path), CrammedBertModel)


def test_classification_and_regression() -> None:
    tokens = ids()
    classes = small(CrammedBertForSequenceClassification, num_labels=3)
    labels = torch.tensor([0, 2, 1])
    out = classes(tokens, labels=labels)
    torch.testing.assert_close(out.loss, functional.cross_entropy(out.logits, labels))
    numbers = small(CrammedBertForSequenceClassification, num_labels=1)
    targets = torch.tensor([0.0, 2.5, 5.0])
    out = numbers(tokens, labels=targets)
    torch.testing.assert_close(out.loss, (out.logits[:, 0] - targets).square().mean())


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="21 tokens is longer than max_position_embeddings=20"):
        small()(ids(21))
    with pytest.raises(ValueError, match="hidden_size=24 is no multiple of 5 heads"):
        small(num_attention_heads=5)
    with pytest.raises(ValueError, match="intermediate_size=33"):
        small(intermediate_size=33)
    model = small(CrammedBertModel)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


def test_tokens_may_be_looked_up_by_the_caller() -> None:
    model, tokens = small(), ids()
    looked_up = model.get_input_embeddings()(tokens)
    for conditioned in (False, True):
        if conditioned:
            wc.condition_(model)
        with torch.no_grad():
            assert torch.equal(model(inputs_embeds=looked_up).logits, model(tokens).logits)


def test_the_monitor_sees_tokens_and_every_head() -> None:
    model = small()
    wc.condition_(model)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[2, 7:] = 0
    rows = wc.measure(model, {"input_ids": ids(), "attention_mask": mask})
    heads = {(row.layer, row.head) for row in rows if row.site == "attention.output"}
    assert heads == {(layer, head) for layer in range(3) for head in range(3)}
    assert heads == {(row.layer, row.head) for row in rows if row.site == "attention.weights"}
    (after,) = [row for row in rows if row.site == "conditioned.after"]
    (before,) = [row for row in rows if row.site == "conditioned.before"]
    assert after.kappa_pinv <= 2.002 < before.kappa_pinv


def test_conditioned_tokens_enter_the_first_block() -> None:
    model, tokens = small(CrammedBertModel), ids()
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens)
        wc.condition_(model)
        model(tokens)
    plain, conditioned = seen
    torch.testing.assert_close(conditioned, wc.conditioned_tokens(plain))


def test_positions_survive_a_load(tmp_path: Path) -> None:
    """The table of sinusoids is not saved; loading must not leave memory as it was."""
    model = small()
    model.save_pretrained(tmp_path)
    loaded = CrammedBertForMaskedLM.from_pretrained(tmp_path)
    (positions,) = [m for m in loaded.modules() if isinstance(m, ScaledSinusoids)]
    assert torch.equal(positions.table, sinusoids(20, 24))


@pytest.mark.slow
def test_a_step_at_the_published_size() -> None:
    """One conditioned optimizer step of 120 million parameters on two sequences of 128 tokens."""
    torch.manual_seed(0)
    model = CrammedBertForMaskedLM(CrammedBertConfig())
    wc.condition_(model)
    tokens = torch.randint(5, 32768, (2, 128))
    labels = torch.where(torch.rand(2, 128) < 0.25, tokens, -100)
    tokens = torch.where(labels == -100, tokens, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(32768.0).log().item(), rel=0.05)
    assert losses[1] < losses[0]
