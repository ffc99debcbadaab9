"""Scope "table": E + C(E) on looked-up rows, fresh when the weights change, the same with and without a cache."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import wellcond as wc
from tests.sites import language
from wellcond import table
from wellcond.hooks import token_hooks
from wellcond.table import TableConditioner, row_operator

CAUSAL = sorted(language.CAUSAL)
TABLE = wc.ConditioningConfig(scope="table")


def causal(name: str, attn: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    model = language.CAUSAL[name](attn).eval()
    ill_condition(model.get_input_embeddings())
    return model


def ill_condition(embedding: nn.Embedding) -> None:
    """Singular values over four orders of magnitude, in place."""
    with torch.no_grad():
        embedding.weight.mul_(torch.logspace(0, -4, embedding.embedding_dim))


def reference(e: torch.Tensor) -> torch.Tensor:
    """E + C(E) from the library's own correction of tokens."""
    return wc.conditioned_tokens(e, method="svd")


@settings(deadline=None)
@given(
    rows=st.integers(1, 12),
    d=st.integers(1, 12),
    rank=st.integers(1, 12),
    decades=st.floats(0, 5),
    method=st.sampled_from(["auto", "svd"]),
    seed=st.integers(0, 2**31),
)
def test_every_table_is_conditioned_row_by_row(rows, d, rank, decades, method, seed):
    """Tall, wide, rank-deficient, badly scaled: E·M is the correction of the whole table, and κ⁺ ≤ 2."""
    draw = torch.Generator().manual_seed(seed)
    rank = min(rank, rows, d)
    u, _ = torch.linalg.qr(torch.randn(rows, rank, generator=draw, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(d, rank, generator=draw, dtype=torch.float64))
    e = (u * torch.logspace(0, -decades, rank, dtype=torch.float64)) @ v.mT * 10 ** (decades - 2)
    found = row_operator(e, method=method, rank_tol=1e-8)
    c = wc.correction(e, method="svd", rank_tol=1e-8)
    assert found.rank == rank
    assert (e @ found.matrix - c).norm() <= 1e-6 * c.norm()
    assert wc.spectrum(e + e @ found.matrix, rank_tol=1e-8).kappa_pinv <= 2.00001
    ratio = e.norm() / (e + c).norm()
    assert found.frobenius_ratio == pytest.approx(ratio.item(), rel=1e-6)


def test_a_table_with_an_infinity_is_nan_and_not_an_error():
    e = torch.eye(3)
    e[0, 0] = torch.inf
    found = row_operator(e)
    assert found.rank == -1
    assert found.matrix.isnan().all()


@pytest.mark.parametrize("e", [torch.zeros(4, 3), torch.zeros(0, 3)])
def test_tables_without_anything_in_them(e):
    found = row_operator(e)
    assert found.rank == 0
    assert found.matrix.eq(0).all()
    assert found.frobenius_ratio == 1.0


def test_complete_needs_full_rank():
    assert row_operator(torch.eye(3), null_space="complete").rank == 3
    with pytest.raises(ValueError, match="rank 1 < 2"):
        row_operator(torch.ones(5, 2), null_space="complete")


@pytest.mark.parametrize("name", CAUSAL)
def test_it_is_the_default_of_causal_models_and_keeps_its_bound(name):
    model = causal(name)
    embedding = model.get_input_embeddings()
    e = embedding.weight.detach().clone()
    handle = wc.condition_(model)
    assert handle.config.scope == "table"
    assert not handle.leaks
    rows = embedding(torch.arange(len(e)))
    assert wc.spectrum(e).kappa_pinv > 100
    assert wc.spectrum(rows).kappa_pinv <= 2.002
    torch.testing.assert_close(rows, reference(e), rtol=1e-5, atol=1e-6)
    assert torch.equal(embedding.weight, e)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_incremental_logits_are_those_of_the_full_sequence(name, attn):
    model, ids = causal(name, attn), language.ids(12)
    wc.condition_(model)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        first = model(ids[:, :5], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        pieces = [first.logits]
        for i in range(5, 12):
            output = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            pieces.append(output.logits)
    assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-4


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_generation_is_the_same_with_and_without_cache(name):
    model, batch = causal(name), left_padded()
    plain = generate(model, batch, use_cache=False)
    wc.condition_(model)
    conditioned = generate(model, batch, use_cache=False)
    assert torch.equal(conditioned, generate(model, batch, use_cache=True))
    assert not torch.equal(conditioned, plain)


def left_padded() -> dict[str, torch.Tensor]:
    ids, mask = language.ids(6), torch.ones(3, 6, dtype=torch.long)
    mask[1, :3], ids[1, :3] = 0, language.PAD
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: nn.Module, batch: dict[str, torch.Tensor], **options) -> torch.Tensor:
    return model.generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=language.PAD, **options)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_ready_embeddings_come_from_the_conditioned_table(name):
    """f(inputs_embeds=E(ids)) = f(ids) when E is the model's own lookup."""
    model, ids = causal(name), language.ids()
    wc.condition_(model)
    with torch.no_grad():
        expected = model(ids).logits
        ready = model.get_input_embeddings()(ids)
        assert (model(inputs_embeds=ready).logits - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_the_head_stays_tied_and_sees_the_table_itself(name):
    model = causal(name)
    table, ids = model.get_input_embeddings().weight, language.ids()
    handle = wc.condition_(model)
    assert model.get_output_embeddings().weight is table
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        assert torch.allclose(output.logits, functional.linear(output.hidden_states[-1], table), atol=1e-6)
    handle.remove()
    assert model.get_output_embeddings().weight is table


class Counting:
    """Counts the computations of the operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = table.row_operator

        def counted(*args, **options):
            self.count += 1
            return original(*args, **options)

        monkeypatch.setattr(table, "row_operator", counted)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = language.ids()
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def test_computed_once_per_change_and_never_at_evaluation(monkeypatch):
    model, ids = causal("GPT-2"), language.ids()
    wc.condition_(model)
    counting = Counting(monkeypatch)
    for _ in range(3):
        model(ids)
    assert counting.count == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.train()
    step(model, optimizer)
    assert counting.count == 1
    step(model, optimizer)
    model(ids)
    assert counting.count == 3  # before each of the later forwards, the table had moved
    model.eval()
    model(ids)
    model(ids)
    assert counting.count == 3
    model(ids[:, :4])
    model.train()
    model(ids)
    assert counting.count == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(torch.logspace(0, -2, 32)),
        lambda weight: weight.detach().mul_(torch.logspace(0, -2, 32)),
        lambda weight: setattr(weight, "data", weight.data * torch.logspace(0, -2, 32)),
    ],
    ids=["data in place", "detached in place", "data replaced"],
)
def test_every_way_of_changing_weights_in_training_is_noticed(change):
    model = causal("Llama")
    embedding = model.get_input_embeddings()
    wc.condition_(model)
    model.train()
    everything = torch.arange(language.VOCAB)
    before = embedding(everything)
    change(embedding.weight)
    after = embedding(everything)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, reference(embedding.weight.detach()), rtol=1e-5, atol=1e-6)
    model.eval()
    assert torch.equal(embedding(everything), after)


def test_weights_loaded_at_evaluation_are_noticed():
    model, other = causal("Llama"), language.CAUSAL["Llama"]().eval()
    wc.condition_(model)
    ids = language.ids()
    model(ids)
    model.load_state_dict(other.state_dict())
    wc.condition_(other)
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_weights_changed_behind_the_back_in_training_are_seen_by_the_next_evaluation():
    model, ids = causal("Llama"), language.ids()
    wc.condition_(model)
    model.train()
    model(ids)
    model.get_input_embeddings().weight.data.add_(torch.randn(language.VOCAB, 32))
    model.eval()
    found = model(ids).logits
    twin = copy.deepcopy(model)
    wc.remove_(twin)
    wc.condition_(twin)
    assert torch.equal(found, twin(ids).logits)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_follows_its_own_table(duplicate):
    model, ids = causal("GPT-2"), language.ids()
    wc.condition_(model)
    expected = model(ids).logits
    twin = duplicate(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(torch.logspace(0, -1, 32))
    model(ids)
    assert torch.equal(twin(ids).logits, expected)
    embedding = twin.get_input_embeddings()
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(language.VOCAB, 32))
    everything = torch.arange(language.VOCAB)
    torch.testing.assert_close(embedding(everything), reference(embedding.weight.detach()))


def test_resized_embeddings_stay_conditioned():
    model = causal("GPT-2")
    wc.condition_(model)
    model(language.ids())
    model.resize_token_embeddings(language.VOCAB + 7)
    embedding = model.get_input_embeddings()
    assert wc.is_conditioned(model)
    assert model.get_output_embeddings().weight is embedding.weight
    rows = embedding(torch.arange(language.VOCAB + 7))
    torch.testing.assert_close(rows, reference(embedding.weight.detach()))


def test_the_padding_row_stays_zero_and_without_gradient():
    for gradient in ("constant", "exact"):
        torch.manual_seed(0)
        embedding = nn.Embedding(9, 4, padding_idx=2)
        model = nn.Sequential(embedding, nn.Linear(4, 3))
        wc.condition_(model, wc.ConditioningConfig(scope="table", gradient=gradient), site="0")
        ids = torch.tensor([[1, 2, 5]])
        assert embedding(ids)[0, 1].eq(0).all()
        model(ids).square().sum().backward()
        assert embedding.weight.grad[2].eq(0).all()
        assert embedding.weight.grad[1].ne(0).any()


def test_constant_gradient_is_that_of_a_plain_lookup():
    model, ids = causal("Llama"), language.ids()
    embedding = model.get_input_embeddings()
    wc.condition_(model)
    upstream = torch.randn(3, 10, 32)
    (embedding(ids) * upstream).sum().backward()
    expected = torch.zeros_like(embedding.weight).index_put_((ids,), upstream, accumulate=True)
    torch.testing.assert_close(embedding.weight.grad, expected)


@pytest.mark.parametrize("rescale", ["none", "frobenius"])
def test_exact_gradient_is_the_derivative_of_the_conditioned_table(rescale):
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 4).double()
    config = wc.ConditioningConfig(scope="table", gradient="exact", rescale=rescale)
    wc.condition_(embedding, config, site="")
    ids = torch.tensor([1, 4, 4, 8])
    upstream = torch.randn(4, 4, dtype=torch.float64)
    (embedding(ids) * upstream).sum().backward()
    weight = embedding.weight.detach()
    direction = torch.randn_like(weight)
    step = 1e-6

    def value(w: torch.Tensor) -> torch.Tensor:
        return (wc.conditioned_tokens(w, rescale=rescale)[ids] * upstream).sum()

    slope = (value(weight + step * direction) - value(weight - step * direction)) / (2 * step)
    assert (embedding.weight.grad * direction).sum().item() == pytest.approx(slope.item(), rel=1e-6)
    with torch.no_grad():
        expected = wc.conditioned_tokens(weight, rescale=rescale)[ids]
        torch.testing.assert_close(embedding(ids), expected)


def test_exact_gradient_refuses_what_is_not_a_plain_table():
    embedding = nn.Embedding(9, 4, sparse=True)
    wc.condition_(embedding, wc.ConditioningConfig(scope="table", gradient="exact"), site="")
    with pytest.raises(ValueError, match="gradient='constant'"):
        embedding(torch.tensor([1]))


def test_rescale_keeps_the_norm_of_the_table():
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 6)
    ill_condition(embedding)
    wc.condition_(embedding, wc.ConditioningConfig(scope="table", rescale="frobenius"), site="")
    rows = embedding(torch.arange(20))
    assert rows.norm().item() == pytest.approx(embedding.weight.norm().item(), rel=1e-5)
    assert wc.spectrum(rows).kappa_pinv <= 2.002


def test_bfloat16_weights_and_autocast():
    model, ids = causal("Llama").bfloat16(), language.ids()
    embedding = model.get_input_embeddings()
    wc.condition_(model)
    rows = embedding(torch.arange(language.VOCAB))
    assert rows.dtype == torch.bfloat16
    expected = reference(embedding.weight.detach().double())
    # Directions below the rounding of bfloat16 are not conditioned; both sides agree on the others.
    found = row_operator(embedding.weight.detach())
    assert found.rank < 32
    kept = embedding.weight.detach().double()
    kept = kept + kept @ found.matrix
    torch.testing.assert_close(rows.double(), kept, rtol=2**-8, atol=1e-6)
    assert not torch.allclose(kept, expected)
    assert model(ids).logits.isfinite().all()
    model = causal("Llama")
    wc.condition_(model)
    exact = model.get_input_embeddings()(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.get_input_embeddings()(ids), exact)


def test_inference_mode_and_training_afterwards():
    model, ids = causal("GPT-2"), language.ids()
    with torch.no_grad():
        wc.condition_(model)
        expected = model(ids).logits
        wc.remove_(model)
    with torch.inference_mode():
        wc.condition_(model)
        assert torch.equal(model(ids).logits, expected)
    model.train()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    everything = torch.arange(language.VOCAB)
    table = model.get_input_embeddings()
    torch.testing.assert_close(table(everything), reference(table.weight.detach()), rtol=1e-4, atol=1e-5)


def test_models_without_a_table_say_so():
    with pytest.raises(ValueError, match="has no token embedding"):
        wc.condition_(language.BUILDERS["ViT"](), TABLE)
    with pytest.raises(ValueError, match=r"'0' is a Linear"):
        wc.condition_(nn.Sequential(nn.Linear(3, 3)), TABLE, site="0")


@pytest.mark.parametrize("name", ["BERT", "T5", "BART", "Nyströmformer"])
def test_encoders_may_choose_it(name):
    torch.manual_seed(0)
    model = language.BUILDERS[name]().eval()
    batch = language.with_decoder(language.sentences()) if name in ("T5", "BART") else language.sentences()
    plain = model(**batch).logits
    handle = wc.condition_(model, TABLE)
    assert not torch.allclose(model(**batch).logits, plain)
    (hook,) = token_hooks(model)
    assert hook.calls == 1  # the decoder's own lookup is not conditioned
    handle.remove()
    assert torch.equal(model(**batch).logits, plain)


def test_full_graph_compilation_sees_new_weights():
    model, ids = causal("GPT-2"), language.ids()
    wc.condition_(model)
    compiled = torch.compile(model.transformer.wte, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model.transformer.wte(ids))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(torch.logspace(0, -1, 32))
    found = compiled(ids)
    twin = copy.deepcopy(model)
    wc.remove_(twin)
    wc.condition_(twin)
    torch.testing.assert_close(found, twin.transformer.wte(ids))


def test_conditioner_without_configuration_is_of_the_table_scope():
    assert TableConditioner().config == TABLE
    assert "constant" in repr(TableConditioner())
