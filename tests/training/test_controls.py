"""The controls change one thing of what conditioning changes, and exactly that."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellcond as wc
from tests.training.tiny import tiny_data, tiny_model
from wellcond.training.controls import ScaledTokens, amplify_positions_


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
def test_amplified_positions_have_the_share_that_conditioning_gives_them(strength: float) -> None:
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
    share = (moved.norm() / conditioned.norm()).item()

    factor = amplify_positions_(model, images)

    after = tokens_of(model, images)
    amplified = model.pos_embed.detach().double().expand_as(after)
    assert torch.allclose(amplified, p * factor, rtol=1e-5)
    assert (amplified.norm() / after.norm()).item() == pytest.approx(share, rel=1e-4)
    assert not wc.is_conditioned(model)


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
