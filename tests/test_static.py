"""Scope "static": X + λQ. The bound, the calibration, and the right row of Q for every token of every model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellcond as wc
from tests.sites import language
from tests.sites.models import MODELS
from tests.sites.test_contract import call, outputs
from wellcond.hooks import token_hooks
from wellcond.linalg import position_code
from wellcond.static import PositionCode, position_rows

STATIC = wc.ConditioningConfig(scope="static", strength=3.0)


def fixed(sigma: float = 1.0, **options) -> wc.ConditioningConfig:
    return wc.ConditioningConfig(scope="static", sigma=sigma, **options)


def causal(name: str) -> nn.Module:
    torch.manual_seed(0)
    return language.CAUSAL[name]().eval()


def seen_by(model: nn.Module) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """What passes the correction from now on: tokens, rows, result."""
    (hook,) = token_hooks(model)
    seen: list[tuple[Tensor, Tensor | None, Tensor]] = []
    hook.transform.register_forward_hook(
        lambda module, args, y: seen.append((args[0], args[1] if len(args) > 1 else None, y))
    )
    return seen


# ------------------------------------------------------------------------------------------ the mathematics


@settings(deadline=None)
@given(
    n=st.integers(1, 30),
    d=st.integers(1, 12),
    decades=st.floats(0, 12),
    strength=st.floats(1.5, 20),
    scale=st.floats(-6, 6),
    seed=st.integers(0, 2**31),
)
def test_bound_by_weyl(n, d, decades, strength, scale, seed):
    """κ(X + λQ) ≤ (λσ_max(Q) + σ₁)/(λσ_min(Q) − σ₁), for any X whose σ₁ is at most the calibrated one."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64) * torch.logspace(0, -decades, d).double()
    x = x * 10**scale
    sigma = torch.linalg.matrix_norm(x, 2).item()
    y = PositionCode(fixed(sigma, strength=strength))(x)
    q = torch.linalg.svdvals(position_code(n, d))
    bound = (strength * q[0] + 1) / (strength * q[-1] - 1)
    assert strength * q[-1] > 1
    assert wc.condition_number(y) <= bound * (1 + 1e-9)


@settings(deadline=None)
@given(n=st.integers(1, 40), longer=st.integers(0, 40), d=st.integers(1, 12))
def test_the_code_of_a_position_does_not_depend_on_the_length(n, longer, d):
    like = torch.empty(0, dtype=torch.float64)
    short, long = position_rows(like, None, n, d), position_rows(like, None, n + longer, d)
    assert torch.equal(short, long[:n])
    sigma = torch.linalg.svdvals(short)
    assert sigma[0] <= math.sqrt(2) * sigma[-1] * (1 + 1e-12)
    if n <= d:
        torch.testing.assert_close(short @ short.mT, torch.eye(n, dtype=like.dtype))


def test_rows_are_looked_up_and_padding_has_none():
    like = torch.empty(0)
    found = position_rows(like, torch.tensor([[-1, 0, 9], [3, 3, -1]]), 3, 4)
    code = position_code(10, 4).float()
    assert torch.equal(found[0], torch.stack([torch.zeros(4), code[0], code[9]]))
    assert torch.equal(found[1], torch.stack([code[3], code[3], torch.zeros(4)]))
    assert position_rows(like, torch.tensor([[-1]]), 1, 4).eq(0).all()
    assert position_rows(like, torch.zeros(2, 0, dtype=torch.long), 0, 4).shape == (2, 0, 4)


def test_input_is_not_changed_and_keeps_its_dtype():
    x = torch.randn(2, 5, 4, dtype=torch.bfloat16)
    before = x.clone()
    y = PositionCode(fixed(3.0))(x)
    assert y.dtype == x.dtype
    assert torch.equal(x, before)
    expected = x.double() + 3.0 * position_code(5, 4)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)


def test_the_gradient_is_the_identity():
    x = torch.randn(5, 4, requires_grad=True)
    PositionCode(fixed())(x).backward(torch.arange(20.0).reshape(5, 4))
    assert torch.equal(x.grad, torch.arange(20.0).reshape(5, 4))


def test_rescaling_would_look_at_the_sequence_and_is_refused():
    with pytest.raises(ValueError, match="rescale='none'"):
        PositionCode(fixed(rescale="frobenius"))


# ------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("name", MODELS)
def test_calibrated_on_every_model_of_the_registry(name):
    """Without calibration it raises; with it every sample of the batch keeps the bound, at every site."""
    example = MODELS[name]
    model, batch = example.model().eval(), example.batch()
    plain = outputs(model, batch)
    handle = wc.condition_(model, STATIC)
    with pytest.raises(RuntimeError, match="calibrate_"):
        call(model, batch)
    state = torch.get_rng_state()
    sigma = wc.calibrate_(model, [batch])
    assert torch.equal(torch.get_rng_state(), state)
    assert handle.config.sigma == sigma
    assert not handle.leaks
    seen = seen_by(model)
    conditioned = outputs(model, batch)
    ((x, rows, y),) = seen
    numbered = (
        torch.ones(x.shape[:-1], dtype=torch.bool) if rows is None else (rows >= 0).expand(x.shape[:-1])
    )
    assert torch.equal(x[~numbered], y[~numbered])
    mask = (
        batch.get("attention_mask") if isinstance(batch, dict) else None
    )  # padding that has a position, too
    real = numbered if mask is None else numbered & mask.bool()
    largest = max(wc.spectrum(m[r]).sigma_max.item() for m, r in zip(x, real, strict=True))
    assert sigma >= largest * (1 - 1e-5)
    for before, after, keep in zip(x, y, real, strict=True):
        n, d = before[keep].shape
        q = torch.linalg.svdvals(position_code(n, d))
        s = wc.spectrum(before[keep]).sigma_max.item() / sigma
        assert wc.condition_number(after[keep]).item() <= (3 * q[0] + s) / (3 * q[-1] - s) * 1.001
    assert any(not torch.allclose(a, b) for a, b in zip(plain, conditioned, strict=True))
    handle.remove()
    for before, after in zip(plain, outputs(model, batch), strict=True):
        assert torch.equal(before, after)


def test_calibration_takes_the_largest_of_all_batches_and_ignores_padding():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    wc.condition_(model, STATIC, site="0")
    assert wc.calibrate_(model, [torch.eye(4)[None], 5 * torch.eye(4)[None], (torch.eye(4)[None],)]) == 5.0
    assert wc.calibrate_(model, ({"input": torch.eye(4)[None]} for _ in range(1))) == 1.0
    bert = language.BUILDERS["BERT"]().eval()
    wc.condition_(bert, STATIC)
    batch = language.sentences()
    sigma = wc.calibrate_(bert, [batch])
    batch["input_ids"][1, 7:] = 5  # other padding
    assert wc.calibrate_(bert, [batch]) == sigma


def test_calibration_refuses_what_it_cannot_measure():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="condition_"):
        wc.calibrate_(model, [torch.eye(4)])
    wc.condition_(model, STATIC, site="0")
    with pytest.raises(ValueError, match="at least one batch"):
        wc.calibrate_(model, [])
    with pytest.raises(ValueError, match=r"σ₁ of the tokens is 0\.0"):
        wc.calibrate_(model, [torch.zeros(1, 4, 4)])
    with pytest.raises(RuntimeError, match="calibrate_"):
        model(torch.eye(4)[None])


def test_calibration_reaches_code_that_is_compiled_already():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    wc.condition_(model, fixed(1.0), site="0")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.eye(4)[None]
    torch.testing.assert_close(compiled(x), model(x))
    wc.calibrate_(model, [7 * x])
    expected = model[1](x + 7 * position_code(4, 4).float())
    torch.testing.assert_close(compiled(x), expected)


# -------------------------------------------------------------------------------------- the right position


@pytest.mark.parametrize("name", sorted(language.CAUSAL))
def test_incremental_logits_are_those_of_the_full_sequence(name):
    model, ids = causal(name), language.ids(12)
    wc.condition_(model, fixed(2.0))
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        first = model(ids[:, :5], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        pieces = [first.logits]
        for i in range(5, 12):
            pieces.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
    assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-4


@pytest.mark.parametrize("name", sorted(language.CAUSAL))
def test_greedy_generation_of_padded_prompts_is_that_of_each_alone(name):
    """With and without cache, padded on the left or not."""
    model = causal(name)
    wc.condition_(model, fixed(2.0))
    ids, mask = language.ids(6), torch.ones(3, 6, dtype=torch.long)
    mask[1, :3], ids[1, :3] = 0, language.PAD
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": language.PAD}
    together = model.generate(ids, attention_mask=mask, use_cache=True, **options)
    assert torch.equal(together, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    alone = model.generate(ids[1:2, 3:], attention_mask=mask[1:2, 3:], **options)
    assert torch.equal(alone[0], together[1, 3:])


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT-NeoX", "OPT"])
def test_without_position_ids_real_tokens_are_counted(name):
    """Left padding moves nothing, although nobody passes position_ids."""
    model, ids = causal(name), language.ids(6)
    wc.condition_(model, fixed(2.0))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).expand(3, 9)
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits
        found = model(nn.functional.pad(ids, (3, 0), value=language.PAD), attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_positions_given_by_the_caller_are_used(name):
    """Two sequences packed into one row each start at position 0."""
    model, ids = causal(name), language.ids(8)
    wc.condition_(model, fixed(2.0))
    seen = seen_by(model)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(3, 8)
    model(ids, position_ids=positions)
    ((x, rows, y),) = seen
    torch.testing.assert_close(y - x, 2 * position_code(5, 32).float()[positions], rtol=1e-4, atol=1e-5)
    assert torch.equal(rows, positions)


def test_a_mask_too_short_for_the_cache_is_refused():
    model, ids = causal("Llama"), language.ids(6)
    wc.condition_(model, fixed())
    with pytest.raises(ValueError, match=r"\(3, 5\) must cover the 0 cached and 6 new tokens"):
        model(ids, attention_mask=torch.ones(3, 5))


@pytest.mark.parametrize(("name", "first"), [("RoBERTa", 2), ("CamemBERT", 2), ("XLM-RoBERTa", 2)])
def test_numbering_from_the_padding_index_starts_at_the_first_row(name, first):
    torch.manual_seed(0)
    model = language.BUILDERS[name]().eval()
    wc.condition_(model, fixed())
    seen = seen_by(model)
    batch = language.sentences()
    model(**batch)
    expected = torch.arange(10).expand(3, 10).clone()
    expected[1, 7:] = -1
    assert torch.equal(seen[0][1], expected)
    model(**batch, position_ids=torch.arange(first, 10 + first)[None])
    assert torch.equal(seen[1][1], torch.arange(10)[None])


def test_class_and_register_tokens_take_the_first_rows():
    example = MODELS["timm DINOv2 registers"]
    model = example.model().eval()
    wc.condition_(model, fixed(5.0))
    seen = seen_by(model)
    outputs(model, example.batch())
    ((x, rows, y),) = seen
    assert rows is None
    assert x.shape[1] == 5 + 25
    torch.testing.assert_close((y - x)[0], 5 * position_code(30, 32).float(), rtol=1e-4, atol=1e-4)


def test_a_grid_is_numbered_row_by_row_and_follows_the_image_size():
    example = MODELS["torchvision Faster R-CNN"]
    model = example.model().eval()
    wc.condition_(model, fixed(5.0))
    seen = seen_by(model)
    for size in (32, 64):
        model([torch.rand(3, size, size)])
    for x, rows, y in seen:
        code = position_code(x.shape[-2], x.shape[-1]).float()
        added = code if rows is None else code[rows.clamp(min=0)] * (rows >= 0)[..., None]
        torch.testing.assert_close(y - x, (5 * added).expand(x.shape), rtol=1e-4, atol=1e-4)


def test_padding_leaves_real_tokens_alone_on_every_model_that_knows_it():
    for name, example in MODELS.items():
        if example.padded is None:
            continue
        model = example.model().eval()
        wc.condition_(model, fixed(2.0))
        results = []
        for extra in (0, 1, 7):
            batch, real = example.padded(extra)
            (output, *_) = outputs(model, batch)
            results.append(output[real] if output.shape[: real.ndim] == real.shape else output)
        for result in results[1:]:
            torch.testing.assert_close(
                result, results[0], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
