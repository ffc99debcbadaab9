"""timm: tokens reach the first block conditioned, however the model is called."""

import dataclasses

import pytest
import timm
import torch

import wellcond as wc
from tests.sites.models import DAVIT, MODELS, SWIN, VIT, XCIT, TimmBackbone, images
from wellcond.attach import attach_, find_known
from wellcond.hooks import token_hooks
from wellcond.sites import Site

FIRST_BLOCK = {
    "timm ViT": "blocks.0",
    "timm DeiT distilled": "blocks.0",
    "timm DINOv2 registers": "blocks.0",
    "timm EVA": "blocks.0",
    "timm EVA-02": "blocks.0",
    "timm DINOv3": "blocks.0",
    "timm Swin": "layers.0",
    "timm SwinV2": "layers.0",
    "timm Swin features": "body.layers_0",
    "timm XCiT": "blocks.0",
    "timm XCiT features": "body.model.blocks.0",
    "timm DaViT": "stages.0",
    "timm VOLO": "network.2",
}


def prepared(name):
    (x,) = MODELS[name].batch()
    return MODELS[name].model().eval(), x


def conditioned_by_hook(model):
    """What the conditioner returns in the next forward, as tokens."""
    (hook,) = token_hooks(model)
    seen = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append(y))
    return seen


def received(model, path):
    seen = []
    model.get_submodule(path).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


@pytest.mark.parametrize("name", FIRST_BLOCK)
@torch.no_grad()
def test_the_first_block_receives_exactly_the_conditioned_tokens(name):
    model, x = prepared(name)
    (site,) = wc.condition_(model).sites
    outgoing, incoming = conditioned_by_hook(model), received(model, FIRST_BLOCK[name])
    model(x)
    assert torch.equal(dataclasses.replace(site, module="").as_tokens(incoming[0]), outgoing[0])
    assert wc.spectrum(outgoing[0]).kappa_pinv.max() <= 2.002


@pytest.mark.parametrize("name", [name for name in FIRST_BLOCK if "features" not in name])
@torch.no_grad()
def test_d12_the_parts_of_a_model_make_the_whole(name):
    model, x = prepared(name)
    plain = model(x)
    wc.condition_(model)
    whole = model(x)
    assert (whole - plain).norm() > 1e-3 * plain.norm()
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), whole, rtol=1e-6, atol=0.0)
    final, features = model.forward_intermediates(x)
    torch.testing.assert_close(model.forward_head(final), whole, rtol=1e-6, atol=0.0)
    assert len(features) >= 2
    only = model.forward_intermediates(x, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(only, features, strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_base_patch16_224", VIT),
        ("vit_base_patch16_dinov3", VIT),
        ("xcit_small_12_p8_224", XCIT),
        ("swin_tiny_patch4_window7_224", SWIN),
        ("swinv2_tiny_window8_256", SWIN),
        ("davit_tiny", DAVIT),
    ],
)
@torch.no_grad()
def test_features_only_is_conditioned_like_the_model(name, options):
    (x,) = images()()
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    features = timm.create_model(name, features_only=True, out_indices=(0, 1), **options).eval()
    features.load_state_dict(flat(model, features), strict=True)
    _, expected = model.forward_intermediates(x)
    plain = features(x)
    wc.condition_(model)
    wc.condition_(features)
    _, conditioned = model.forward_intermediates(x)
    for found, unconditioned, wanted in zip(features(x), plain, conditioned[:2], strict=True):
        assert (found - unconditioned).norm() > 1e-3 * unconditioned.norm()
        channels_first = found if found.shape == wanted.shape else found.permute(0, 3, 1, 2)
        torch.testing.assert_close(channels_first, wanted, rtol=1e-5, atol=1e-5)
    assert len(expected) == len(conditioned)


def flat(model, features):
    """The state dict of a whole model under the names of its features-only twin."""
    state = model.state_dict()
    names = {}
    for key in features.state_dict():
        old = key.removeprefix("model.")
        for part in ("layers", "stages"):
            old = old.replace(f"{part}_", f"{part}.", 1) if old.startswith(part) else old
        names[key] = state[old]
    return names


@torch.no_grad()
def test_features_taken_by_hooks():
    (x,) = images()()
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", features_only=True, feature_cls="hook", out_indices=(1,), **SWIN
    ).eval()
    plain = model(x)[0]
    wc.condition_(model)
    assert not torch.allclose(model(x)[0], plain, rtol=1e-3)


@torch.no_grad()
def test_volo_cut_off_before_its_positions_is_conditioned_at_the_patches():
    model, x = prepared("timm VOLO")
    model.prune_intermediate_layers([0])
    (site,) = wc.condition_(model).sites
    assert (site.module, site.layout) == ("patch_embed", "NCHW")
    outgoing = conditioned_by_hook(model)
    model.forward_intermediates(x, indices=[0], intermediates_only=True)
    assert wc.spectrum(outgoing[0]).kappa_pinv.max() <= 2.002


def test_features_of_a_convolutional_network_are_not_taken_for_a_transformer():
    model = timm.create_model("resnet18", features_only=True)
    with pytest.raises(ValueError, match="no known transformer"):
        wc.condition_(model)


@pytest.mark.parametrize("size", [32, 40, 64])
@torch.no_grad()
def test_any_image_size(size):
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **VIT, dynamic_img_size=True).eval()
    wc.condition_(model)
    outgoing = conditioned_by_hook(model)
    model(torch.rand(2, 3, size, size))
    assert outgoing[0].shape == (2, (size // 8) ** 2 + 1, 32)
    assert wc.spectrum(outgoing[0]).kappa_pinv.max() <= 2.002


@pytest.mark.parametrize(
    "options",
    [
        {"no_embed_class": True},
        {"reg_tokens": 4},
        {"class_token": False, "global_pool": "avg"},
        {"pre_norm": True},
    ],
)
@torch.no_grad()
def test_prefix_tokens_take_part(options):
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **{**VIT, **options}).eval()
    (site,) = wc.condition_(model).sites
    outgoing, incoming = conditioned_by_hook(model), received(model, "blocks.0")
    (x,) = images()()
    model(x)
    assert torch.equal(incoming[0], outgoing[0])
    assert site.prefix == model.num_prefix_tokens
    assert outgoing[0].shape[1] == 16 + site.prefix


@pytest.mark.parametrize(
    "options", [{"no_embed_class": True}, {"pre_norm": True}, {"dynamic_img_size": True}]
)
def test_positions_that_are_not_merely_added_do_not_fold(options):
    model = timm.create_model("vit_base_patch16_224", **VIT, **options)
    assert "input" not in find_known(model).sites.folds


def test_patch_dropout_conditions_what_is_left():
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **VIT, patch_drop_rate=0.5).train()
    wc.condition_(model)
    outgoing = conditioned_by_hook(model)
    (x,) = images()()
    model(x).sum().backward()
    assert outgoing[0].shape == (3, 9, 32)
    assert wc.spectrum(outgoing[0]).kappa_pinv.max() <= 2.002


@torch.no_grad()
def test_tokens_are_conditioned_before_positions_are_added():
    model, x = prepared("timm ViT")
    (site,) = wc.condition_(model, wc.ConditioningConfig(placement="tokens")).sites
    outgoing, incoming = conditioned_by_hook(model), received(model, "blocks.0")
    model(x)
    assert site == Site("patch_embed", patch=(8, 8))
    torch.testing.assert_close(incoming[0][:, 1:], outgoing[0] + model.pos_embed[:, 1:])


@pytest.mark.parametrize(
    ("name", "placement", "shape"),
    [
        ("vit_base_patch16_224", "input", (197, 768)),
        ("vit_base_patch16_224", "tokens", (196, 768)),
        ("deit_base_distilled_patch16_224", "input", (198, 768)),
        ("deit3_base_patch16_224", "input", (197, 768)),
        ("vit_base_patch16_clip_224", "input", (197, 768)),
        ("vit_base_patch14_reg4_dinov2", "input", (1374, 768)),
        ("eva02_base_patch14_224", "tokens", (256, 768)),
        ("vit_base_patch16_dinov3", "input", (261, 768)),
        ("swin_base_patch4_window7_224", "input", (3136, 128)),
        ("swinv2_base_window8_256", "input", (4096, 128)),
        ("xcit_medium_24_p16_224", "input", (196, 512)),
        ("xcit_medium_24_p16_224", "tokens", (196, 512)),
        ("davit_base", "input", (3136, 128)),
        ("volo_d1_224", "input", (196, 384)),
        ("volo_d1_224", "tokens", (784, 192)),
    ],
)
@torch.no_grad()
def test_full_size_models_reach_the_site_once(name, placement, shape):
    """Shapes only, without memory or time: N and d of the paper's models and their kin."""

    class Look(torch.nn.Module):
        def forward(self, x, mask=None):
            seen.append(tuple(x.shape))
            return x.clone()

    seen = []
    model = timm.create_model(name, device="meta").eval()
    attach_(model, Look(), None, placement)
    model(torch.empty(2, *model.default_cfg["input_size"], device="meta"))
    assert seen == [(2, *shape)]


def test_a_backbone_inside_another_model_is_found():
    model = torch.nn.ModuleDict({"left": TimmBackbone("davit_tiny", False, **DAVIT)})
    (site,) = wc.condition_(model).sites
    assert site.module == "left.body.stem"
    twins = torch.nn.ModuleList([MODELS["timm ViT"].model() for _ in range(2)])
    with pytest.raises(ValueError, match="2 transformers"):
        wc.condition_(twins)


# -------------------------------------------------------------------------------- what the monitor reads of them


@pytest.mark.parametrize(
    "name", ["timm ViT", "timm EVA-02", "timm DINOv3", "timm XCiT", "timm Swin", "timm DaViT", "timm VOLO"]
)
def test_fused_and_plain_attention_give_the_same_rows(name):
    model, x = prepared(name)
    found = {}
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        found[fused] = wc.measure(model.double(), x.double())
    assert len(found[True]) == len(found[False]) > 4
    for a, b in zip(found[True], found[False], strict=True):
        assert (a.site, a.layer, a.head, a.module, a.samples) == (
            b.site,
            b.layer,
            b.head,
            b.module,
            b.samples,
        )
        # A fused softmax rounds differently; κ moves by about κ·eps·√(N·d), and here κ stays below 1e9.
        assert a.kappa == pytest.approx(b.kappa, rel=1e-4) or min(a.kappa, b.kappa) > 1e9


def test_blocks_that_hold_their_attention_themselves():
    model = timm.create_model("vit_base_patch16_xp_224", **VIT).double()
    (x,) = images()()
    rows = [row for row in wc.measure(model, x.double()) if row.layer == 0]
    block, seen = model.blocks[0], []
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model.eval()(x.double())
        _, q, k, v = block.in_proj(block.in_norm(seen[0])).split(block.in_split, dim=-1)
        q, k, v = (t.view(3, 17, 4, 8).transpose(1, 2) for t in (q, k, v))
        weights = (block.q_norm(q) @ block.k_norm(k).mT / 8**0.5).softmax(-1)
    assert len(rows) == 8
    for row in rows:
        matrices = weights if row.site == "attention.weights" else weights @ v
        assert row.kappa == pytest.approx(torch.linalg.cond(matrices[:, row.head]).mean().item(), rel=1e-6)


def test_cross_covariance_attention_by_hand():
    model, x = prepared("timm XCiT")
    seen = []
    model.blocks[0].attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    rows = [row for row in wc.measure(model.double(), x.double()) if row.module == "blocks.0.attn"]
    attention, tokens = model.blocks[0].attn, seen[0]
    b, n, d = tokens.shape
    q, k, v = attention.qkv(tokens).reshape(b, n, 3, 4, d // 4).permute(2, 0, 3, 4, 1)
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    weights = ((q @ k.mT) * attention.temperature).softmax(-1)
    for head in range(4):
        output, weight = (
            next(r for r in rows if r.site == f"attention.{kind}" and r.head == head)
            for kind in ("output", "weights")
        )
        assert output.kappa == pytest.approx(
            torch.linalg.cond((weights @ v)[:, head]).mean().item(), rel=1e-6
        )
        assert weight.kappa == pytest.approx(torch.linalg.cond(weights[:, head]).mean().item(), rel=1e-6)
