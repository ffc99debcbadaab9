"""The controls change one thing of what conditioning changes, and exactly that."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import wellcond as wc
from tests.training.tiny import tiny_data, tiny_model
from wellcond.attach import attach_to_table_
from wellcond.training.controls import ScaledTable, ScaledTokens, amplify_positions_


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 9), d=st.integers(1, 9))
def test_scaled_tokens_have_the_norm_of_conditioned_ones_and_the_old_directions(
    seed: int, n: int, d: int
) -> None:
    x = torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed))
    y = ScaledTokens()(x)
    assert torch.allclose(y.norm(dim=(1, 2)), wc.conditioned_tokens(x).norm(dim=(1, 2)), rtol=1e-4)
    ratio = y.norm(dim=(1, 2)) / x.norm(dim=(1, 2))
    assert torch.allclose(y, x * ratio[:, None, None], rtol=1e-4, atol=1e-6)


def test_scaled_tokens_leave_padding_alone_and_padding_leaves_them_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 4)
    mask = torch.tensor([[True, True, True, False, False]])
    y = ScaledTokens()(x, mask)
    assert torch.equal(y[:, 3:], x[:, 3:])
    assert torch.allclose(y[:, :3], ScaledTokens()(x[:, :3]), rtol=1e-5)


def test_the_ratio_is_a_constant_of_the_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 4, requires_grad=True)
    y = ScaledTokens()(x)
    y.sum().backward()
    ratio = (y.norm() / x.norm()).item()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.full_like(x, ratio), rtol=1e-5)


def test_scaled_tokens_keep_the_dtype() -> None:
    assert ScaledTokens()(torch.randn(1, 5, 4).bfloat16()).dtype == torch.bfloat16


def tokens_of(model: nn.Module, images: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = model.get_submodule("norm_pre").register_forward_hook(lambda m, a, output: kept.append(output))
    with torch.no_grad():
        model(images)
    handle.remove()
    return kept[0].double()


@pytest.mark.parametrize("strength", [0.3, 1.0, 3.0])
def test_amplified_positions_have_the_weight_that_conditioning_gives_them(strength: float) -> None:
    """By definition: conditioning maps P to P W with W the matrix that maps X to X + C."""
    torch.manual_seed(0)
    model = tiny_model().eval()
    images = tiny_data().train.pixels[:8]
    with torch.no_grad():
        model.pos_embed.mul_(strength * 20)
    x = tokens_of(model, images)
    p = model.pos_embed.detach().double().expand_as(x)
    conditioned = wc.conditioned_tokens(x)
    w = torch.linalg.pinv(x) @ conditioned  # the map on the row space, where X + C = X W
    outside = torch.eye(x.shape[-1], dtype=x.dtype) - torch.linalg.pinv(x) @ x
    moved = p @ (w + outside)  # the rest of P is left as it is
    weight = (moved.norm() / (conditioned - moved).norm()).item()

    factor = amplify_positions_(model, images)

    after = tokens_of(model, images)
    amplified = model.pos_embed.detach().double().expand_as(after)
    assert torch.allclose(amplified, p * factor, rtol=1e-5)
    assert (amplified.norm() / (after - amplified).norm()).item() == pytest.approx(weight, rel=1e-4)
    assert not wc.is_conditioned(model)


def test_positions_that_cancel_the_content_are_amplified_too() -> None:
    """There ‖P W‖ > ‖X W‖: the share of the whole norm could not be met (Fashion-MNIST's dark margins do this)."""
    torch.manual_seed(0)
    model = tiny_model().eval()
    images = tiny_data().train.pixels[:1].expand(8, -1, -1, -1)
    with torch.no_grad():
        content = tokens_of(model, images)[0] - model.pos_embed[0]
        model.pos_embed.copy_(-0.95 * content + 0.02 * torch.randn_like(model.pos_embed))
    x = tokens_of(model, images)
    p = model.pos_embed.detach().double().expand_as(x)
    moved = p @ torch.linalg.pinv(x) @ wc.conditioned_tokens(x)
    assert moved.norm() > wc.conditioned_tokens(x).norm()
    assert amplify_positions_(model, images) > 0


def test_a_model_whose_positions_are_no_parameter_is_refused() -> None:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=24, depths=(1, 1, 1, 1)
    )
    with pytest.raises(ValueError, match="leave this arm out"):
        amplify_positions_(model, torch.randn(2, 3, 32, 32))


def test_zero_positions_are_refused() -> None:
    model = tiny_model()
    nn.init.zeros_(model.pos_embed)
    with pytest.raises(ValueError, match="position embeddings are zero"):
        amplify_positions_(model, tiny_data().train.pixels[:4])


# ------------------------------------------------------------------------------------------- decoders


def decoder() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():  # a table as training leaves it, with directions of very different size
        model.transformer.wte.weight *= torch.logspace(0, -2, 16)
    return model


def ids() -> Tensor:
    return torch.randint(40, (3, 20), generator=torch.Generator().manual_seed(0))


def drop_output(model: GPT2LMHeadModel) -> Tensor:
    kept: list[Tensor] = []
    handle = model.transformer.drop.register_forward_hook(lambda m, a, output: kept.append(output))
    with torch.no_grad():
        model(ids())
    handle.remove()
    return kept[0].double()


def test_a_scaled_table_has_the_norm_of_the_conditioned_one_and_does_not_leak() -> None:
    model = decoder()
    table = model.transformer.wte.weight.detach().clone()
    with torch.no_grad():
        plain = model.transformer.wte(ids())
        attach_to_table_(model, ScaledTable())
        rows = model.transformer.wte(ids())
    ratio = (wc.conditioned_tokens(table).norm() / table.norm()).item()
    assert ratio > 1.5
    assert torch.allclose(rows, ratio * plain, rtol=1e-4)
    assert torch.equal(model.transformer.wte.weight, table)
    assert wc.leak(model, ids()) == 0.0
    assert not wc.is_conditioned(model)


def test_positions_of_a_decoder_get_the_weight_that_its_conditioned_table_leaves_them() -> None:
    model = decoder()
    p = model.transformer.wpe.weight[:20].detach().double().expand(3, 20, 16)
    with wc.condition_(model):
        weight = (p.norm() / (drop_output(model) - p).norm()).item()
    before = model.transformer.wpe.weight.detach().clone()

    factor = amplify_positions_(model, ids())

    assert factor < 1.0, "a conditioned table has larger rows, so positions lose weight"
    assert torch.allclose(model.transformer.wpe.weight, before * factor)
    assert (factor * p.norm() / (drop_output(model) - factor * p).norm()).item() == pytest.approx(
        weight, rel=1e-4
    )
    assert not wc.is_conditioned(model)
    assert wc.leak(model, ids()) == 0.0


def test_positions_that_are_normalised_with_the_tokens_are_refused() -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="leave this arm out"):
        amplify_positions_(model, ids())
