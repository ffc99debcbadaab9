"""transformers: where the tokens are, what is padding however the model is called, and what attention computes."""

import re

import pytest
import torch
from torch import Tensor, nn

import wellcond as wc
from tests.sites import language
from wellcond.attach import find_known
from wellcond.hooks import token_hooks

ALL = {**language.BUILDERS, **language.CAUSAL}
ENCODERS = ["BERT", "RoBERTa", "ELECTRA", "DistilBERT", "Nyströmformer"]
SAMPLE = wc.ConditioningConfig(scope="sample", allow_leak=True)
TOKENS = wc.ConditioningConfig(scope="sample", placement="tokens", allow_leak=True)


def build(name: str, attn: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    return ALL[name]("eager" if name == "Nyströmformer" else attn).eval()


def first(output) -> Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def record(model: nn.Module) -> list:
    """(tokens, mask, result) of every conditioning from now on."""
    (hook,) = token_hooks(model)
    seen: list = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    return seen


def batch_of(name: str) -> dict:
    return language.BATCHES.get(name, language.sentences)()


def first_block_input(model: nn.Module, name: str, batch: dict) -> Tensor:
    """What the first block receives, read from the block itself."""
    path = {"XLM-RoBERTa": "roberta.encoder.layer", "CamemBERT": "roberta.encoder.layer"}.get(name)
    block = model.get_submodule((path or language.LAYERS.get(name, "model.layers")) + ".0")
    seen = []
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ALL)
def test_the_input_is_what_the_first_block_receives(name):
    """Real rows conditioned, padding untouched, and nothing in between the site and the block."""
    model, batch = build(name), batch_of(name)
    before = first_block_input(model, name, batch)
    wc.condition_(model, SAMPLE)
    seen = record(model)
    after = first_block_input(model, name, batch)
    ((x, mask, y),) = seen
    assert torch.equal(x, before)
    assert torch.equal(y, after)
    assert wc.spectrum(y, mask).kappa_pinv.max() <= 2.002
    if "attention_mask" in batch:
        assert torch.equal(mask, batch["attention_mask"].bool())
        assert torch.equal(x[~mask], y[~mask])
    assert find_known(model).sites.causal == (name in language.CAUSAL)


@pytest.mark.parametrize("config", [SAMPLE, TOKENS], ids=["input", "tokens"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_padding_mask_is_found_however_the_model_is_called(name, config):
    model, batch = build(name), language.sentences()
    inner = find_known(model).module
    wc.condition_(model, config)
    with torch.no_grad():
        expected = inner(**batch).last_hidden_state
        positional = inner(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        assert torch.equal(positional, expected)
        assert torch.equal(inner(batch["input_ids"], attention_mask=batch["attention_mask"])[0], expected)
        for mask in (batch["attention_mask"].bool(), batch["attention_mask"].float()):
            assert torch.equal(inner(batch["input_ids"], attention_mask=mask)[0], expected)
        real = batch["attention_mask"].bool()
        other = {**batch, "input_ids": torch.where(real, batch["input_ids"], 7)}
        if name != "RoBERTa":  # which takes positions from the padding id
            torch.testing.assert_close(
                inner(**other).last_hidden_state[real], expected[real], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("config", [SAMPLE, TOKENS], ids=["input", "tokens"])
@pytest.mark.parametrize("name", [*ENCODERS, "GPT-2", "Llama", "OPT", "GPT-NeoX"])
def test_tokens_looked_up_by_the_caller_are_conditioned_like_ids(name, config):
    """f(inputs_embeds=E(ids)) = f(ids), with the mask, although E is called outside the model."""
    model, batch = build(name), language.sentences()
    if config is TOKENS and find_known(model).sites.tokens is None:
        pytest.skip("no positions are added")
    if name == "RoBERTa":
        batch["position_ids"] = torch.arange(2, 12).expand(
            3, 10
        )  # else it numbers ids and embeddings differently
    wc.condition_(model, config)
    with torch.no_grad():
        expected = first(model(**batch))
        ready = model.get_input_embeddings()(batch.pop("input_ids"))
        assert (first(model(inputs_embeds=ready, **batch)) - expected).abs().max() <= 1e-6
    (hook,) = token_hooks(model)
    assert hook.calls == 2


@pytest.mark.parametrize("shape", [(3, 1, 10, 10), (3, 10, 10), (30,)])
def test_a_mask_that_does_not_say_what_is_padding_is_refused(shape):
    model = build("BERT")
    wc.condition_(model)
    with pytest.raises(ValueError, match=re.escape(f"(batch, tokens) with 1 = real, got {shape}")):
        model(language.ids(), attention_mask=torch.ones(shape))
    assert model(language.ids()).logits.isfinite().all()  # the refusal has left nothing behind


def test_a_fully_masked_row_is_left_alone():
    model, batch = build("BERT"), language.sentences()
    batch["attention_mask"][2] = 0
    wc.condition_(model)
    seen = record(model)
    model(**batch)
    ((x, _, y),) = seen
    assert torch.equal(x[2], y[2])
    assert y.isfinite().all()


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_of_an_encoder_and_decoder_only_the_encoder_is_conditioned(name):
    model, batch = build(name), batch_of(name)
    handle = wc.condition_(model)
    assert "encoder" in handle.sites[0].module
    assert handle.config.scope == "sample"
    seen = record(model)
    model(**batch)
    ((x, _, _),) = seen
    assert x.shape[1] == 10
    options = {"max_new_tokens": 5, "do_sample": False}
    source = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}
    cached = model.generate(**source, use_cache=True, **options)
    assert torch.equal(cached, model.generate(**source, use_cache=False, **options))


def test_the_detr_encoder_knows_padded_pixels():
    """Real features do not depend on what the padding holds."""
    torch.manual_seed(0)
    encoder = language.detr().encoder.eval()
    wc.condition_(encoder)
    x = torch.randn(2, 12, 32)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 7:] = False
    other = torch.where(mask[..., None], x, 9.0)
    with torch.no_grad():
        results = [encoder(inputs_embeds=v, attention_mask=mask).last_hidden_state for v in (x, other)]
    torch.testing.assert_close(results[0][mask], results[1][mask])


def test_images_of_another_size():
    model = build("ViT")
    wc.condition_(model)
    seen = record(model)
    with torch.no_grad():
        model(torch.rand(2, 3, 48, 40), interpolate_pos_encoding=True)
    ((x, _, y),) = seen
    assert x.shape == (2, 1 + 6 * 5, 32)
    assert wc.spectrum(y).kappa_pinv.max() <= 2.002


@pytest.mark.parametrize("name", ALL)
def test_attention_is_measured_alike_with_either_implementation(name):
    batch = batch_of(name)
    rows = wc.measure(build(name, "sdpa"), batch)
    assert [row.site for row in rows[:1]] == ["tokens"]
    layers = {(row.layer, row.head) for row in rows if row.site == "attention.output"}
    # DETR, T5 and BART have two encoder layers; T5's decoder layers attend to themselves, too.
    depth = 4 if name == "T5" else 2
    assert layers == {(layer, head) for layer in range(depth) for head in range(4)}
    weights = [row for row in rows if row.site == "attention.weights"]
    assert len(weights) == (0 if name == "Nyströmformer" else 4 * depth)
    if name == "Nyströmformer":
        return
    for one, other in zip(rows, wc.measure(build(name, "eager"), batch), strict=True):
        assert (one.site, one.layer, one.head, one.module) == (
            other.site,
            other.layer,
            other.head,
            other.module,
        )
        assert one.kappa_pinv == pytest.approx(other.kappa_pinv, rel=2e-2)


def test_heads_of_bert_are_those_of_the_definition():
    """softmax(QKᵀ/√d)V per head, by hand, of the real tokens of each sentence."""
    model, batch = build("BERT"), language.sentences()
    rows = [row for row in wc.measure(model, batch) if row.layer == 0]
    x = first_block_input(model, "BERT", batch)
    attention = model.bert.encoder.layer[0].attention.self
    real = batch["attention_mask"].bool()
    outputs: list[list[float]] = [[] for _ in range(4)]
    weights: list[list[float]] = [[] for _ in range(4)]
    with torch.no_grad():
        for tokens, keep in zip(x, real, strict=True):
            q, k, v = (
                layer(tokens[keep]).double().unflatten(-1, (4, 8)).transpose(0, 1)
                for layer in (attention.query, attention.key, attention.value)
            )
            softmax = (q @ k.mT / 8**0.5).softmax(-1)
            for head in range(4):
                outputs[head].append(torch.linalg.cond(softmax[head] @ v[head]).item())
                weights[head].append(torch.linalg.cond(softmax[head]).item())
    for site, expected in (("attention.output", outputs), ("attention.weights", weights)):
        found = [row.kappa for row in rows if row.site == site]
        for head in range(4):
            assert found[head] == pytest.approx(sum(expected[head]) / 3, rel=1e-2)


def test_nystrom_attention_with_fewer_landmarks_than_tokens_is_measured_by_its_outputs():
    torch.manual_seed(0)
    model = language.build(
        "NystromformerModel",
        "NystromformerConfig",
        **language.BERT,
        num_landmarks=5,
        segment_means_seq_len=10,
        conv_kernel_size=3,
    )("eager").eval()
    rows = wc.measure(model, {"input_ids": language.ids()})
    outputs = [row for row in rows if row.site == "attention.output"]
    assert len(outputs) == 8
    assert not [row for row in rows if row.site == "attention.weights"]
    with torch.no_grad():
        x = model.embeddings(language.ids())
        heads = model.encoder.layer[0].attention.self(x)[0].unflatten(-1, (4, 8)).double()
    for head in range(4):
        expected = torch.linalg.cond(heads[:, :, head]).mean().item()
        assert outputs[head].kappa == pytest.approx(expected, rel=1e-3)


def test_a_block_run_outside_its_model_is_refused_rather_than_wrong():
    """OPT's input is that of its first block; run alone, as a checkpoint may do it, its padding is not known."""
    model = build("OPT").train()
    batch = language.without_cache(language.sentences())
    wc.condition_(model, wc.ConditioningConfig(scope="static", sigma=1.0))
    model(**batch).logits.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**batch).logits.square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])
    with pytest.raises(RuntimeError, match="gradient checkpointing"):
        model.model.decoder.layers[0](torch.randn(1, 4, 32))


def test_a_model_with_a_text_and_a_vision_half_must_choose():
    model = nn.ModuleDict({"text": build("BERT"), "vision": build("ViT")})
    with pytest.raises(ValueError, match=r"2 transformers .*text\.bert: BertModel.*vision\.vit: ViTModel"):
        wc.condition_(model)
    wc.condition_(model["text"])
    assert wc.is_conditioned(model)


@pytest.mark.parametrize("config", [None, SAMPLE, wc.ConditioningConfig(scope="static", sigma=2.0)])
@pytest.mark.parametrize("name", ["Llama", "T5", "BERT"])
def test_measuring_tokens_looked_up_by_the_caller(name, config):
    """The rows are those of the same ids."""
    model, batch = build(name), batch_of(name)
    if config is not None:
        wc.condition_(model, config)
    ready = {key: value for key, value in batch.items() if key != "input_ids"}
    with torch.no_grad():
        ready["inputs_embeds"] = model.get_input_embeddings()(batch["input_ids"])
    for one, other in zip(wc.measure(model, batch), wc.measure(model, ready), strict=True):
        assert (one.site, one.layer, one.head, one.rank) == (other.site, other.layer, other.head, other.rank)
        assert one.kappa == pytest.approx(other.kappa, rel=1e-3)
