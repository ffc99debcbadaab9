"""The Long Range Arena's classifiers: padding, neighbours, landmarks; measuring and conditioning them."""

import pytest
import torch
from torch import nn
from transformers import NystromformerConfig, NystromformerModel

import wellcond as wc
from wellcond.models.lra_classifier import (
    NystromAttention,
    PaddedNystromformer,
    PairClassifier,
    SequenceClassifier,
    mean_of_real,
    nystromformer,
    softmax_transformer,
)
from wellcond.training.spectra import token_spectra

VOCABULARY, LENGTH = 16, 32
SMALL = {"num_landmarks": 8, "conv_kernel_size": 5, "hidden_size": 16, "intermediate_size": 32}


def encoder(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    return nystromformer(VOCABULARY, LENGTH, **(SMALL | changes)).eval()  # type: ignore[arg-type]


def batch(samples: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences of different lengths, padded with 0."""
    torch.manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH))
    lengths = torch.randint(9, LENGTH + 1, (samples, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def published_attention(attention: NystromAttention, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """LRA/code/attention_nystrom.py in plain loops over samples and heads, with an exact pseudo-inverse."""
    rows = []
    for tokens, real in zip(x.double(), mask.double(), strict=True):
        heads = []
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            q, k, v = (
                (tokens @ f.weight[part].double().T + f.bias[part].double()) * real[:, None]
                for f in (attention.query, attention.key, attention.value)
            )
            q, k = q / 8**0.25, k / 8**0.25
            q_marks, k_marks = (torch.stack([s.mean(0) for s in part.split(4)]) for part in (q, k))
            first, second = (q @ k_marks.T).softmax(-1), (q_marks @ k_marks.T).softmax(-1)
            third = (q_marks @ k.T - 1e9 * (1 - real)).softmax(-1)
            out = first @ torch.linalg.pinv(second) @ third @ v
            kernel = attention.conv.weight[head, 0, :, 0].double()
            wide = torch.cat([v.new_zeros(2, 8), v, v.new_zeros(2, 8)])
            heads.append(out + sum(kernel[i] * wide[i : i + LENGTH] for i in range(5)))
        rows.append(torch.cat(heads, -1))
    return torch.stack(rows)


def test_attention_is_the_published_formula() -> None:
    """Large weights, so that the kernels are far from uniform; more iterations, so that the inverse is reached."""
    attention = encoder().encoder.layer[0].attention.self  # type: ignore[union-attr]
    for f in (attention.query, attention.key):  # type: ignore[union-attr]
        nn.init.normal_(f.weight, std=0.4)  # type: ignore[union-attr, arg-type]
    x, mask = torch.randn(3, LENGTH, 16), batch(3)["attention_mask"]
    mask[0] = 1  # without padding, whose segments are equal rows, the kernel has an inverse
    inverse = attention.iterative_inv  # type: ignore[union-attr]
    attention.iterative_inv = lambda kernel: inverse(kernel, n_iter=30)  # type: ignore[union-attr]
    with torch.no_grad():
        found = attention(x[:1], mask[:1].bool())[0]
        expected = published_attention(attention, x[:1], mask[:1])  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_with_a_landmark_for_each_token_it_is_softmax_attention() -> None:
    attention = encoder(num_landmarks=LENGTH).encoder.layer[0].attention.self  # type: ignore[union-attr]
    nn.init.zeros_(attention.conv.weight)  # type: ignore[union-attr, arg-type]
    for f in (attention.query, attention.key):  # type: ignore[union-attr]
        nn.init.normal_(f.weight, std=0.6)  # type: ignore[union-attr, arg-type]
    inverse = attention.iterative_inv  # type: ignore[union-attr]
    attention.iterative_inv = lambda kernel: inverse(kernel, n_iter=40)  # type: ignore[union-attr]
    x = torch.randn(1, LENGTH, 16)
    with torch.no_grad():
        found = attention(x)[0]
        q, k, v = (
            f(x).unflatten(-1, (2, 8)).transpose(1, 2)
            for f in (attention.query, attention.key, attention.value)
        )  # type: ignore[union-attr, operator]
        expected = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_what_stands_in_padding_changes_nothing() -> None:
    model, inputs = SequenceClassifier(encoder(), 10).eval(), batch()
    filled = inputs["input_ids"].where(inputs["attention_mask"].bool(), torch.tensor(7))
    with torch.no_grad():
        torch.testing.assert_close(model(filled, inputs["attention_mask"]), model(**inputs))


def test_transformers_own_fails_with_padding() -> None:
    """The reason for `NystromAttention`; if this no longer fails, look again."""
    config = NystromformerConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32,
        max_position_embeddings=LENGTH, segment_means_seq_len=LENGTH, num_landmarks=8, conv_kernel_size=5,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="size of tensor"):
        NystromformerModel(config)(**batch())


def test_without_padding_it_is_transformers_own_up_to_the_inverse() -> None:
    """Samples one by one, and one head: then the largest norm in the batch is the matrix's own."""
    mine = encoder(num_attention_heads=1)
    theirs = NystromformerModel(mine.config).eval()  # type: ignore[arg-type]
    theirs.load_state_dict(mine.state_dict())
    ids = batch()["input_ids"].clamp(min=1)
    for one in ids.split(1):
        with torch.no_grad():
            torch.testing.assert_close(
                mine(input_ids=one).last_hidden_state, theirs(input_ids=one).last_hidden_state
            )


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_result_does_not_depend_on_its_neighbours(conditioned: bool) -> None:
    model, inputs = SequenceClassifier(encoder(), 10).eval(), batch()
    for layer in model.encoder.encoder.layer:  # type: ignore[union-attr]
        nn.init.normal_(layer.attention.self.query.weight, std=0.5)
    if conditioned:
        wc.condition_(model)
    with torch.no_grad():
        together = model(**inputs)
        for i in range(4):
            alone = model(**{name: value[i : i + 1] for name, value in inputs.items()})
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


def test_the_mean_is_over_real_tokens() -> None:
    class Same(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> object:
            output = nn.Module()
            output.last_hidden_state = input_ids[..., None].double()  # type: ignore[assignment]
            return output

    ids = torch.tensor([[4, 8, 99], [3, 99, 99], [99, 99, 99]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert mean_of_real(Same(), ids, mask).flatten().tolist() == [6, 3, 0]


def test_pairs_are_told_apart_and_their_order_counts() -> None:
    torch.manual_seed(0)
    model = PairClassifier(encoder(), 2).eval()
    one, other = batch(seed=1), batch(seed=2)

    def logits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model(**a, other_ids=b["input_ids"], other_mask=b["attention_mask"])

    assert not torch.allclose(logits(one, other), logits(other, one))
    with torch.no_grad():
        means = [mean_of_real(model.encoder, **part) for part in (one, other)]
        expected = model.head(torch.cat([*means, means[0] * means[1], means[0] - means[1]], -1))
    torch.testing.assert_close(logits(one, other), expected)


def test_lengths_that_segments_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens cannot be divided into 8 segments"):
        encoder()(input_ids=torch.ones(1, 30, dtype=torch.long))


def test_attention_matrices_do_not_exist() -> None:
    attention = encoder().encoder.layer[0].attention.self  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="never forms its attention matrix"):
        attention(torch.randn(1, LENGTH, 16), output_attentions=True)  # type: ignore[operator]


def test_half_precision_keeps_the_attention_in_float32() -> None:
    model, inputs = SequenceClassifier(encoder(), 10).eval(), batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(**inputs)
    with torch.no_grad():
        torch.testing.assert_close(low.float(), model(**inputs), rtol=0.05, atol=0.05)
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("make", [encoder, lambda: softmax_transformer(VOCABULARY, LENGTH, hidden_size=16)])
def test_the_published_size_has_gradients_everywhere(pairs: bool, make: object) -> None:
    model = (PairClassifier if pairs else SequenceClassifier)(make(), 10)  # type: ignore[operator]
    inputs = batch()
    if pairs:
        inputs |= {"other_ids": inputs["input_ids"].flip(0), "other_mask": inputs["attention_mask"].flip(0)}
    model(**inputs).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_the_published_setting() -> None:
    """As lra_config.py has it for every task."""
    model = nystromformer(32, 256)
    attention = model.encoder.layer[1].attention.self  # type: ignore[union-attr]
    assert isinstance(model, PaddedNystromformer)
    assert len(model.encoder.layer) == 2
    assert (attention.num_attention_heads, attention.attention_head_size, attention.num_landmarks) == (
        2,
        32,
        128,
    )
    assert attention.conv.weight.shape == (2, 1, 35, 1)
    assert model.encoder.layer[0].intermediate.dense.weight.shape == (128, 64)
    assert model.embeddings.dropout.p == 0.1
    assert attention.conv.bias is None


# ------------------------------------------------------------------------- conditioning, measurement


@pytest.mark.parametrize("pairs", [False, True])
def test_conditioning_and_measuring(pairs: bool) -> None:
    """κ⁺ of the conditioned tokens, and κ⁺ of every head's output over the real tokens."""
    model = (PairClassifier if pairs else SequenceClassifier)(encoder(), 10).eval()
    inputs = batch()
    if pairs:
        inputs |= {"other_ids": inputs["input_ids"].flip(0), "other_mask": inputs["attention_mask"].flip(0)}
    wc.condition_(model)
    rows = wc.measure(model, inputs)
    assert next(row for row in rows if row.site == "conditioned.after").kappa_pinv <= 2.002
    outputs = [row for row in rows if row.site == "attention.output"]
    assert [(row.layer, row.head) for row in outputs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {row.samples for row in rows} == {8 if pairs else 4}

    kept: list[torch.Tensor] = []
    attention = model.encoder.encoder.layer[0].attention.self  # type: ignore[union-attr]
    attention.register_forward_hook(lambda module, args, output: kept.append(output[0]))
    with torch.no_grad():
        model(**inputs)
    masks = torch.cat([inputs["attention_mask"], inputs["other_mask"]]) if pairs else inputs["attention_mask"]
    for head in range(2):
        expected = [
            torch.linalg.cond(tokens[real.bool(), 8 * head : 8 * head + 8].double()).item()
            for tokens, real in zip(kept[0], masks, strict=True)
        ]
        assert outputs[head].kappa == pytest.approx(sum(expected) / len(expected), rel=1e-3)


@pytest.mark.parametrize("arm", ["baseline", "conditioned"])
def test_spectra_are_of_real_tokens(arm: str) -> None:
    """Padding is not conditioned: with it the report's σ after conditioning would not look conditioned."""
    model, inputs = SequenceClassifier(encoder(), 10).eval(), batch()
    inputs["attention_mask"][0] = (torch.arange(LENGTH) < 12).long()
    with torch.no_grad():
        real = model.encoder.embeddings(inputs["input_ids"][:1, :12])  # type: ignore[union-attr, operator]
    if arm == "conditioned":
        wc.condition_(model)
    spectra = token_spectra(model, inputs)
    assert spectra["before"] is not None
    assert len(spectra["before"]) == 12
    if arm == "conditioned":
        assert spectra["after"] is not None
        assert max(spectra["after"]) / min(spectra["after"]) <= 2.002
    else:
        assert spectra["before"] == pytest.approx(torch.linalg.svdvals(real[0].double()).tolist(), rel=1e-5)
        assert spectra["after"] is None
    assert not [p for p in model.encoder._forward_pre_hooks if arm == "baseline"]  # type: ignore[union-attr]


def test_tokens_before_positions_have_the_rank_of_their_table() -> None:
    """At most 15 different tokens: X is 32×64 and of rank 15 at most, C is made over that range."""
    torch.manual_seed(0)
    model = SequenceClassifier(nystromformer(VOCABULARY, LENGTH, num_landmarks=8), 10).eval()
    wc.condition_(model, wc.ConditioningConfig(placement="tokens"))
    rows = {row.site: row for row in wc.measure(model, batch())}
    assert rows["conditioned.before"].rank <= 15
    assert rows["conditioned.before"].kappa == float("inf")
    assert rows["conditioned.after"].kappa_pinv <= 2.002


@pytest.mark.slow
def test_four_thousand_tokens_of_width_64() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(nystromformer(257, 4096), 2)
    wc.condition_(model)
    ids = torch.randint(1, 257, (2, 4096))
    mask = (torch.arange(4096) < torch.tensor([[4000], [1500]])).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    model(**inputs).square().sum().backward()
    rows = wc.measure(model, inputs)
    assert next(row for row in rows if row.site == "conditioned.after").kappa_pinv <= 2.002
    assert all(row.rank <= 64 for row in rows)
