"""The paper's statements: true wherever they claim to be, and false somewhere just outside."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellcond as wc
from wellcond import theory
from wellcond.theory.statements import compare, kappa, softmax_matrix

timm = pytest.importorskip("timm")

sides = st.integers(1, 7)
seeds = st.integers(0, 2**31 - 1)
EPS = 1e-9


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def isometry(m: int, n: int, first: int = 0) -> Tensor:
    """Rows or columns of an identity, so that κ = 1; row i has its 1 in column i + ``first``."""
    size = max(m, n)
    return torch.eye(size, dtype=torch.float64).roll(first, 1)[:m, :n]


def head(n: int, d: int, d_k: int, d_v: int, seed: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    x, w_q, w_k, w_v = (
        random(n, d, seed=seed),
        *(random(d, c, seed=seed + i) for i, c in enumerate((d_k, d_k, d_v), 1)),
    )
    return x, scale * w_q, w_k, w_v


# ------------------------------------------------------------------------------------------------- the lemma


@settings(max_examples=150, deadline=None)
@given(sides, sides, sides, seeds, st.floats(0, 4))
def test_product_holds_wherever_it_applies(m: int, k: int, n: int, seed: int, spread: float) -> None:
    a = random(m, k, seed=seed) * torch.logspace(0, -spread, k, dtype=torch.float64)
    s = theory.product(a, random(k, n, seed=seed + 1))
    assert s.applies == (min(m, n) <= k <= max(m, n))
    assert s.holds is not False or not s.applies


@settings(max_examples=150, deadline=None)
@given(sides, sides, sides)
def test_product_fails_for_some_matrices_of_every_other_shape(m: int, k: int, n: int) -> None:
    """The condition is sharp: A and B of κ = 1 whose product is rank-deficient."""
    a, b = isometry(m, k), isometry(n, k, first=max(k - n, 0)).mT
    s = theory.product(a, b)
    assert s.right == 1.0
    assert s.holds is s.applies
    if not s.applies:
        assert s.left == math.inf


def test_the_counterexample_of_the_paper_page() -> None:
    s = theory.product(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]]))
    assert (s.left, s.right, s.applies, s.holds, s.slack) == (math.inf, 1.0, False, False, 0.0)
    assert "inner dimension 2 is not between 1 and 1" in s.reason


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), ValueError, "different inner dimensions 3, 2"),
        (torch.zeros(2), torch.zeros(2, 3), ValueError, "a must be one non-empty matrix"),
        (torch.zeros(2, 0), torch.zeros(0, 2), ValueError, r"\(2, 0\)"),
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(3, 2), TypeError, "a must be a real floating"),
        (torch.zeros(2, 3), torch.full((3, 2), math.nan), ValueError, "b of shape .* NaN"),
    ],
)
def test_product_says_what_is_wrong(a: Tensor, b: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        theory.product(a, b)


def test_holds_has_the_resolution_of_float64() -> None:
    assert compare("", "", 1.0, 2.0, True, "", 4).holds is True
    assert compare("", "", 2.0, 1.0, True, "", 4).holds is False
    assert compare("", "", math.inf, 1e10, True, "", 4).holds is False
    assert compare("", "", math.inf, 1e17, True, "", 4).holds is None
    assert compare("", "", math.inf, math.inf, True, "", 4).holds is True
    assert compare("", "", math.nan, 1.0, True, "", 4).holds is None


# ------------------------------------------------------------------------------------------- Proposition 4.2


@settings(max_examples=100, deadline=None)
@given(sides, sides, sides, sides, seeds)
def test_attention_bounds_hold_wherever_they_apply(n: int, d: int, d_k: int, d_v: int, seed: int) -> None:
    tensors = head(n, d, d_k, d_v, seed, scale=0.3)
    for check in (theory.linear_attention, theory.softmax_attention, theory.values_attention):
        s = check(*tensors)
        assert s.holds is not False or not s.applies, s


@settings(max_examples=60, deadline=None)
@given(sides, sides, seeds)
def test_one_head_is_covered_and_its_sides_are_the_formula(n: int, d: int, seed: int) -> None:
    x, w_q, w_k, w_v = head(n, d, d, d, seed, scale=0.1)
    linear = theory.linear_attention(x, w_q, w_k, w_v)
    assert linear.applies == (n >= d)
    product_of_kappas = kappa(w_q) * kappa(w_k) * kappa(w_v) * kappa(x) ** 3
    assert linear.right == pytest.approx(product_of_kappas, rel=EPS)
    softmax = theory.softmax_attention(x, w_q, w_k, w_v)
    assert softmax.applies
    attention = softmax_matrix(x, w_q, w_k)
    assert softmax.right == pytest.approx(kappa(attention) * kappa(x) * kappa(w_v), rel=EPS)
    assert torch.allclose(attention.sum(-1), torch.ones(n, dtype=torch.float64))


def test_linear_attention_of_a_narrow_head_can_fail() -> None:
    """Tokens and weights of κ = 1; keys and values look at different features, so that LA(X) = 0."""
    w_q, w_k = isometry(4, 2), isometry(4, 2)
    w_v = isometry(2, 4, first=2).mT
    s = theory.linear_attention(isometry(6, 4), w_q, w_k, w_v)
    assert (s.left, s.right, s.applies, s.holds) == (math.inf, 1.0, False, False)


def test_linear_attention_of_fewer_tokens_than_features_can_fail() -> None:
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    s = theory.linear_attention(isometry(1, 2), turn, torch.eye(2).double(), torch.eye(2).double())
    assert (s.left, s.right, s.applies, s.holds) == (math.inf, 1.0, False, False)
    assert "fewer tokens than features" in s.reason


def test_softmax_attention_of_a_narrow_head_and_few_tokens_can_fail_but_not_through_its_values() -> None:
    x, w_v = isometry(2, 5), isometry(2, 5, first=2).mT
    zero = torch.zeros(5, 2)
    w_q, w_k = 9 * isometry(5, 2), isometry(5, 2)
    s = theory.softmax_attention(x, w_q, w_k, w_v)
    assert (s.left, s.applies, s.holds) == (math.inf, False, False)
    assert theory.values_attention(x, w_q, w_k, w_v).holds
    assert theory.softmax_attention(x, zero, zero, w_v).right == math.inf  # equal weights: S has rank one


@given(st.integers(1, 3), st.integers(1, 4))
def test_heads_are_the_columns_of_a_layer_in_order(heads: int, width: int) -> None:
    w = random(5, heads * width)
    assert torch.equal(torch.cat(theory.split_heads(w, heads), -1), w)
    with pytest.raises(ValueError, match="do not divide"):
        theory.split_heads(w, heads * width + 1)


def test_attention_refuses_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"needs W_Q, W_K of shape \(4, d_k\)"):
        theory.linear_attention(random(3, 4), random(4, 2), random(4, 3), random(4, 2))


# ------------------------------------------------------------------------------------- Theorems 4.4 and 4.5


@settings(max_examples=100, deadline=None)
@given(sides, sides, seeds, st.floats(0, 10))
def test_theorem_4_4_is_attained_exactly(n: int, d: int, seed: int, spread: float) -> None:
    u = torch.linalg.qr(random(n, n, seed=seed)).Q
    v = torch.linalg.qr(random(d, d, seed=seed + 1)).Q
    r = min(n, d)
    sigma = torch.logspace(2, 2 - spread, r, dtype=torch.float64)
    s = theory.conditioning((u[:, :r] * sigma) @ v[:, :r].mT)
    assert s.applies
    assert s.holds
    smallest = 10.0**-spread if r > 1 else 1.0
    assert s.left == pytest.approx(2 / (1 + smallest), rel=1e-6)


def test_theorem_4_4_of_a_rank_deficient_matrix_needs_the_completion() -> None:
    x = torch.ones(4, 3)
    kept = theory.conditioning(x)
    assert (kept.left, kept.applies, kept.holds) == (math.inf, False, False)
    assert "rank 1 of 3" in kept.reason
    filled = theory.conditioning(x, null_space="complete")
    assert filled.applies
    assert filled.holds
    assert not theory.conditioning(torch.zeros(4, 3), null_space="complete").applies


@settings(max_examples=100, deadline=None)
@given(sides, sides, seeds, st.floats(0, 3), st.floats(0.01, 1))
def test_theorem_4_5_follows_from_its_assumption(
    n: int, d: int, seed: int, spread: float, scale: float
) -> None:
    x, w_q, w_k, w_v = head(n, d, d, d, seed, scale)
    x = x * torch.logspace(0, -spread, d, dtype=torch.float64)
    for conditioned in (
        None,
        torch.nn.functional.layer_norm(wc.conditioned_tokens(x), (d,)) + 0.1 * random(n, d),
    ):
        s = theory.conditioned_bound(x, w_q, w_k, w_v, conditioned=conditioned)
        assert s.holds or not s.applies, s


def test_theorem_4_5_has_cases_on_both_sides_of_its_assumption() -> None:
    x = random(6, 6) * torch.logspace(0, -4, 6, dtype=torch.float64)
    eye = torch.eye(6).double()
    met = theory.conditioned_bound(x, 0.01 * eye, eye, eye)
    assert met.applies
    assert met.holds
    assert "assumption met" in met.reason
    # X + C is larger than X: it saturates a softmax with large weights, so that rows of S repeat.
    failed = theory.conditioned_bound(
        random(6, 6, seed=5), 0.3 * random(6, 6, seed=55), random(6, 6, seed=104), eye
    )
    assert "assumption not met" in failed.reason
    assert (failed.applies, failed.holds) == (False, False)


def test_theorem_4_5_of_rank_deficient_tokens_compares_infinities() -> None:
    eye = torch.eye(3)
    s = theory.conditioned_bound(torch.ones(4, 3), eye, eye, eye)
    assert not s.applies
    assert "rank-deficient" in s.reason


def test_logits_that_overflow_are_no_verdict() -> None:
    huge = 1e200 * torch.eye(2, dtype=torch.float64)
    s = theory.softmax_attention(torch.eye(2), huge, huge, torch.eye(2))
    assert math.isnan(s.left)
    assert s.holds is None


def test_a_smaller_bound_is_not_a_smaller_kappa() -> None:
    s = theory.conditioned_attention(*head(6, 4, 4, 4, seed=3))
    assert not s.applies
    assert s.source == "no statement"
    with pytest.raises(ValueError, match="must agree"):
        theory.conditioned_attention(*head(6, 4, 4, 4, seed=3), conditioned=random(5, 4))


# ------------------------------------------------------------------------------------- the fixed correction


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), sides, seeds, st.floats(0.1, 10))
def test_weyl_bound_holds_wherever_it_applies(n: int, d: int, seed: int, strength: float) -> None:
    s = theory.fixed_correction(random(n, d, seed=seed), strength)
    assert s.applies == math.isfinite(s.right)
    assert s.holds


def test_weyl_bound_is_attained_and_silent_below_sigma_one() -> None:
    code = torch.eye(2, dtype=torch.float64)
    x = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    s = theory.fixed_correction(x, 3.0, code)
    assert (s.left, s.right, s.slack) == (2.0, 2.0, 1.0)
    assert not theory.fixed_correction(x, 1.0, code).applies
    with pytest.raises(ValueError, match="strength"):
        theory.fixed_correction(x, 0.0)
    with pytest.raises(ValueError, match="must agree"):
        theory.fixed_correction(x, 1.0, torch.eye(3))


# ------------------------------------------------------------------------------------------- a real model


def vit(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, object] = {
        "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3,
    }  # fmt: skip
    return timm.models.vision_transformer.VisionTransformer(**options | changes)


def test_on_model_reads_what_the_model_computes() -> None:
    """S X̃ W̃_V of every head, biases included, is what the attention module's output projection receives."""
    from wellcond.theory.on_model import attention_layer, heads_of, tokens_and_inputs

    model = vit().eval()
    nn.init.normal_(model.blocks[1].attn.qkv.bias)
    images = torch.randn(2, 3, 16, 16)
    attention = attention_layer(model, 1)
    seen: list[Tensor] = []
    attention.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    _, inputs = tokens_and_inputs(model, attention, images)
    for x, expected in zip(inputs, seen[0], strict=True):
        mine = torch.cat([softmax_matrix(a, q, k) @ a @ v for a, q, k, v in heads_of(attention, x)], -1)
        assert torch.allclose(mine.float(), expected, atol=1e-4)


def test_on_model_counts_heads_and_images_and_leaves_the_model_alone() -> None:
    model = vit()
    before = copy.deepcopy(model.state_dict())
    table = {line.name: line for line in theory.on_model(model, torch.randn(3, 3, 16, 16))}
    assert table["κ(X + C) ≤ 2"].cases == 3
    assert table["κ(X + C) ≤ 2"].holds == 3
    assert table["κ(A(X)) ≤ κ(S) κ(X W_V)"].cases == 6
    assert table["κ(A(X)) ≤ κ(S) κ(X W_V)"].applies == 6
    assert "bound of A(LN(X+C)) ≤ bound of A(X)" in table
    assert "bound of A(X+C) ≤ bound of A(X)" in table
    assert not wc.is_conditioned(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_on_model_names_what_it_cannot_read() -> None:
    images = torch.randn(1, 3, 16, 16)
    with pytest.raises(ValueError, match="layer 2 is not one of the 2"):
        theory.on_model(vit(), images, layer=2)
    with pytest.raises(ValueError, match="no norms inside"):
        theory.on_model(vit(qk_norm=True), images)
    with pytest.raises(ValueError, match="has no blocks"):
        theory.on_model(nn.Linear(2, 2), images)


def test_propagation_agrees_with_measure_and_promises_nothing() -> None:
    model = vit()
    images = torch.randn(2, 3, 16, 16)
    layers = theory.propagation(model, images)
    rows = [row for row in wc.measure(model, images) if row.site == "attention.output" and row.layer == 1]
    assert layers[1].right == pytest.approx(sum(row.kappa for row in rows) / len(rows))
    assert layers[0].left < layers[0].right
    assert not any(layer.applies for layer in layers)
    assert not wc.is_conditioned(model)


def test_run_prints_every_statement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    table = theory.run("test_vit", samples=1)
    printed = capsys.readouterr().out
    assert all(line.name in printed and line.source in printed for line in table)
    assert "κ of layer 0" in printed
    with pytest.raises(ValueError, match=r"3 images wanted, 2 found"):
        theory.run("test_vit", samples=3)
    with pytest.raises(ValueError, match="timm cannot build 'no_such_vit'"):
        theory.run("no_such_vit")
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        theory.run("test_vit", tmp_path / "nothing")


def test_the_command_reads_a_folder_of_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("tyro")
    from wellcond.cli import main

    noise = torch.randint(0, 256, (3, 40, 60, 3), dtype=torch.uint8)
    for i, picture in enumerate(noise):
        image.fromarray(picture.numpy()).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    assert main(["theory", "test_vit", "--data", str(tmp_path), "--samples", "3"]) == 0
    assert "3 images" in capsys.readouterr().out
    assert main(["theory", "resnet18"]) == 2


# ------------------------------------------------------------------------------------------- tangent kernel


def jacobian_rows(model: nn.Module, x: Tensor) -> Tensor:
    """J ``(n·c, parameters)`` one backward at a time: the reference."""
    rows = []
    for sample in x:
        for output in model(sample[None])[0]:
            grads = torch.autograd.grad(
                output, list(model.parameters()), retain_graph=True, allow_unused=True
            )
            rows.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if g is None else g).flatten()
                        for g, p in zip(grads, model.parameters(), strict=True)
                    ]
                )
            )
    return torch.stack(rows)


@pytest.mark.parametrize("gradient", [None, "constant", "exact"])
def test_tangent_kernel_is_the_one_of_the_training_gradient(gradient: str | None) -> None:
    model = vit(img_size=8, in_chans=1, embed_dim=8).double().eval()
    if gradient is not None:
        wc.condition_(model, wc.ConditioningConfig(gradient=gradient))
    x = random(5, 1, 8, 8)
    jacobian = jacobian_rows(model, x)
    kernel = theory.tangent_kernel(model, x, chunk=2)
    assert torch.allclose(kernel, jacobian @ jacobian.mT, rtol=1e-9, atol=1e-9 * float(kernel.abs().max()))
    assert torch.equal(kernel, kernel.mT)


def test_tangent_kernel_of_frozen_parameters_and_wrong_outputs() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    x = random(4, 3).float()
    kernel = theory.tangent_kernel(model, x)
    assert torch.allclose(kernel, torch.kron((x @ x.mT).double(), torch.eye(2).double()), atol=1e-5)
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="needs outputs"):
        theory.tangent_kernel(nn.Conv1d(3, 2, 1), random(4, 3, 5).float())
    with pytest.raises(ValueError, match="needs a gradient"):
        theory.tangent_kernel(model.requires_grad_(False), x)
