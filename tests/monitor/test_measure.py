"""measure: right numbers, nothing silent, nothing left behind."""

import gc
import json
import math
import weakref

import pytest
import timm
import torch
from torch import nn

import wellcond as wc
from wellcond.monitor import JsonLines, read_lines
from wellcond.monitor.attention import AttentionReader, attention_weights
from wellcond.monitor.rows import read, summarise
from wellcond.running import undisturbed
from wellcond.sites import AttentionKind


def small_vit(**options):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_base_patch16_224", **{**shape, **options})


@pytest.fixture
def images():
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def rows_of(rows, site):
    return [row for row in rows if row.site == site]


def heads_by_hand(model, images):
    """Head outputs and weights of the first block, float64, straight from the definition."""
    model = model.double().eval()
    block = model.blocks[0]
    x = block.norm1(model.norm_pre(model._pos_embed(model.patch_embed(images.double()))))
    b, n, d = x.shape
    q, k, v = block.attn.qkv(x).reshape(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / (d // 4) ** 0.5).softmax(-1)
    return weights @ v, weights


def test_rows_are_kappa_of_the_definition(images):
    rows = wc.measure(small_vit().double(), images.double())
    outputs, weights = heads_by_hand(small_vit(), images)
    for head in range(4):
        for site, matrices in (("attention.output", outputs), ("attention.weights", weights)):
            row = rows_of(rows, site)[head]
            expected = torch.linalg.cond(matrices[:, head]).mean().item()
            assert (row.layer, row.head, row.module) == (0, head, "blocks.0.attn")
            # The model computes in float32: its rounding moves κ by about eps·κ.
            assert row.kappa == pytest.approx(expected, rel=1e-5 * max(1.0, expected / 10))


def test_tokens_come_first_and_are_conditioned(images):
    model = small_vit()
    before = wc.measure(model, images)
    wc.condition_(model)
    after = wc.measure(model, images)
    assert after[0].site == "tokens"
    assert after[0].kappa_pinv <= 2.002
    assert rows_of(after, "conditioned.before")[0].kappa == pytest.approx(before[0].kappa)
    assert rows_of(after, "conditioned.after")[0].kappa == after[0].kappa


def test_tokens_placement_shows_what_positions_do_afterwards(images):
    model = small_vit()
    wc.condition_(model, wc.ConditioningConfig(placement="tokens"))
    rows = wc.measure(model, images)
    assert rows_of(rows, "conditioned.after")[0].kappa_pinv <= 2.002
    assert rows[0].module == "norm_pre"
    assert rows[0].samples == 3


def test_fused_attention_is_not_silent(images):
    fused, plain = small_vit(), small_vit()
    for block in plain.blocks:
        block.attn.fused_attn = False
    for one, other in zip(wc.measure(fused, images), wc.measure(plain, images), strict=True):
        assert (one.site, one.layer, one.head) == (other.site, other.layer, other.head)
        assert one.kappa == pytest.approx(other.kappa, rel=1e-2)


def test_a_layer_that_never_runs_raises(images):
    model = small_vit()
    model.blocks[1] = nn.Identity()
    model.spare = small_vit().blocks[1]
    with pytest.raises(RuntimeError, match=r"'spare\.attn' was never computed"):
        wc.measure(model, images)


def test_a_conditioned_site_that_is_bypassed_raises():
    class Bypass(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4)

        def forward(self, x, use=True):
            return self.embed(x) if use else x

    model = Bypass()
    wc.condition_(model, site="embed")
    assert wc.measure(model, (torch.randn(2, 5, 4),))[0].kappa_pinv <= 2.002
    with pytest.raises(RuntimeError, match="not reached"):
        wc.measure(model, (torch.randn(2, 5, 4), False))


def test_unknown_model_says_how_to_name_a_site():
    with pytest.raises(ValueError, match="site="):
        wc.measure(nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2))


def test_attention_of_an_unknown_class_is_said_to_be_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wc.condition_(model, site="0")
    with pytest.warns(UserWarning, match=r"no self-attention that wellcond knows inside Sequential"):
        rows = wc.measure(model, torch.randn(2, 5, 4))
    assert {row.site for row in rows} == {"tokens", "conditioned.before", "conditioned.after"}


def test_measuring_changes_nothing(images):
    model = small_vit(drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)
    model.train()
    model.blocks[0].eval()
    flags = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = model(images)
    torch.manual_seed(3)
    wc.measure(model, images)
    assert torch.equal(model(images), expected)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_in_the_forward_leaves_no_hook_and_restores_training(images):
    model = small_vit().train()
    with pytest.raises(AssertionError):
        wc.measure(model, torch.rand(2, 3, 30, 30))
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_activation_outlives_the_measurement(images):
    model = small_vit()
    kept = []

    def keep(module, args, output):
        kept.append(weakref.ref(output))

    model.blocks[0].attn.register_forward_hook(keep)
    monitor = wc.ConditioningMonitor(model, every=1)
    for step in range(3):
        monitor.after_step(step, images)
    gc.collect()
    assert len(kept) == 3
    assert all(ref() is None for ref in kept)
    assert all(
        isinstance(value, (int, float, str, type(None)))
        for row in monitor.rows
        for value in row.to_dict().values()
    )


def test_compiled_models_are_measured_eagerly_once_per_call(images):
    model = small_vit().eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(images)
    monitor = wc.ConditioningMonitor(compiled, every=1)
    for step in range(3):
        monitor.after_step(step, images)
        compiled(images)
    assert len([row for row in monitor.rows if row.site == "tokens"]) == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_give_one_record(images, reentrant, monkeypatch):
    model = small_vit()
    model.set_grad_checkpointing(True)
    monkeypatch.setattr("timm.models._manipulate.use_reentrant_ckpt", lambda: reentrant, raising=False)
    model(images).sum().backward()
    rows = wc.measure(model, images)
    assert len(rows_of(rows, "tokens")) == 1
    assert len(rows_of(rows, "attention.output")) == 2 * 4


def test_kappa_of_heads_is_not_kappa_of_the_mean_head():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 3, 6, 4)
    weights = attention_weights(q * torch.tensor([0.1, 1.0, 3.0]).reshape(1, 3, 1, 1), k, v)
    spectra, present = read(weights, None)
    assert spectra.kappa.shape == (1, 3)
    assert summarise((spectra, present))["kappa"] == pytest.approx(
        torch.linalg.cond(weights).mean().item(), rel=1e-4
    )
    assert spectra.kappa.mean() > 2 * torch.linalg.cond(weights.mean(1))[0]


def test_padding_leaves_the_valid_block_and_masked_samples_are_skipped():
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 6])
    weights = attention_weights(*torch.randn(3, 2, 1, 6, 4), attn_mask=mask[:, None, None, :])
    assert torch.linalg.matrix_rank(weights[0, 0]) < 6

    class Layer(nn.Module):
        num_heads = 1

    reader = AttentionReader(Layer(), AttentionKind("num_heads", ""), lambda: mask)
    reader.read_weights(weights)
    fields = summarise(reader.weights)
    assert fields["samples"] == 1
    assert fields["kappa"] == pytest.approx(torch.linalg.cond(weights[0, 0, :4, :4]).item(), rel=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("additive", [True, False])
def test_weights_beside_the_kernel_are_its_weights(causal, additive):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = None
    if additive and not causal:
        mask = torch.randn(5, 5)
    weights = attention_weights(q, k, v, attn_mask=mask, is_causal=causal)
    fused = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(weights @ v, fused)


def test_grouped_queries():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    weights = attention_weights(q, k, v, enable_gqa=True)
    fused = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=-3), fused)


def test_rank_deficient_rows_survive_a_strict_parser(tmp_path):
    row = wc.Row(0, "tokens", None, None, **summarise(read(torch.ones(1, 2, 2), None)), module="m")
    assert row.kappa == math.inf
    assert (row.rank, row.kappa_pinv) == (1, pytest.approx(1.0))
    JsonLines(tmp_path / "rows.jsonl", arm="a/b: c")([row])
    JsonLines(tmp_path / "rows.jsonl")([row])

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert read_lines(tmp_path / "rows.jsonl")[0] == {**row.to_dict(), "arm": "a/b: c"}


def test_a_corrupt_line_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"step": 0}\n{"step": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
        read_lines(tmp_path / "rows.jsonl")


def test_monitor_needs_a_batch_and_sane_numbers(images):
    with pytest.raises(ValueError, match="batch"):
        wc.ConditioningMonitor(small_vit()).after_step(0)
    with pytest.raises(ValueError, match="every=0"):
        wc.ConditioningMonitor(small_vit(), every=0)


def test_monitor_measures_a_step_once_and_few_samples(images):
    monitor = wc.ConditioningMonitor(small_vit(), every=2, batch=images, samples=2)
    assert monitor.after_step(0)[0].samples == 2
    assert monitor.after_step(0) == []
    assert monitor.after_step(1) == []
    assert [row.step for row in monitor.after_step(2) if row.site == "tokens"] == [2]


def test_data_parallel_wrappers_are_looked_through(images):
    assert wc.measure(nn.DataParallel(small_vit()), images) == wc.measure(small_vit(), images)


def test_undisturbed_restores_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[0].eval()
    seen = []
    with pytest.raises(KeyError), undisturbed(model):
        seen.append(model[1].training) or {}["an error"]
    assert seen == [False]
    assert (model[0].training, model[1].training) == (False, True)
