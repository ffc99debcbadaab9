"""torchvision: transformers, and detectors whose padding pixels are no tokens."""

import functools

import pytest
import torch
from torch import nn
from torchvision.models import SwinTransformer, vit_b_16
from torchvision.models.detection import MaskRCNN, RetinaNet, fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.faster_rcnn import AnchorGenerator, FastRCNNPredictor, TwoMLPHead
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.ops import MultiScaleRoIAlign

import wellcond as wc
from tests.sites.models import MODELS, VIT, XCIT, TimmBackbone, faster_rcnn, images, photographs
from wellcond.hooks import token_hooks


def seen_by_conditioner(model):
    """(tokens, mask, conditioned) of the next forwards."""
    (hook,) = token_hooks(model)
    seen = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    return seen


def image(height, width, seed=0):
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed))


def vit_detector(**options):
    """A plain ViT with class token, of any size, as backbone."""
    return faster_rcnn("vit_base_patch16_224", False, **VIT, dynamic_img_size=True, **options)


def mask_rcnn():
    """Mask R-CNN on XCiT features."""
    backbone = TimmBackbone("xcit_small_12_p8_224", False, **XCIT)
    return MaskRCNN(
        backbone,
        min_size=32,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=2, sampling_ratio=2),
        box_head=TwoMLPHead(backbone.out_channels * 4, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        mask_roi_pool=MultiScaleRoIAlign(["0"], output_size=4, sampling_ratio=2),
        mask_head=nn.Conv2d(backbone.out_channels, 8, 3, padding=1),
        mask_predictor=nn.ConvTranspose2d(8, 3, 2, 2),
        box_score_thresh=0.0,
        box_detections_per_img=5,
    )


DETECTORS = {"Swin": faster_rcnn, "ViT": vit_detector, "XCiT Mask R-CNN": mask_rcnn}


def built(name):
    torch.manual_seed(0)
    return DETECTORS[name]().eval()


@torch.no_grad()
def test_the_first_block_of_a_vit_receives_the_conditioned_tokens():
    model = vit_b_16(image_size=32, num_classes=5).eval()
    handle = wc.condition_(model)
    seen, incoming = seen_by_conditioner(model), []
    model.encoder.layers[0].register_forward_pre_hook(lambda module, args: incoming.append(args[0]))
    model(images()()[0])
    assert handle.sites[0].module == "encoder.dropout"
    assert torch.equal(incoming[0], seen[0][-1])
    assert wc.spectrum(incoming[0]).kappa_pinv.max() <= 2.002


@torch.no_grad()
def test_swin_v2():
    torch.manual_seed(0)
    sizes = {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 1],
        "num_heads": [2, 4],
        "window_size": [4, 4],
    }
    model = SwinTransformer(**sizes, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2).eval()
    wc.condition_(model)
    incoming = []
    model.features[1].register_forward_pre_hook(lambda module, args: incoming.append(args[0]))
    (x,) = images()()
    model(x)
    assert wc.spectrum(incoming[0].flatten(1, 2)).kappa_pinv.max() <= 2.002
    weights = [row for row in wc.measure(model, x) if row.site == "attention.weights"]
    assert weights[0].module == "features.1.0.attn"


def test_shifted_window_attention_is_read_although_its_forward_calls_no_submodule():
    """Windows by hand, from the definition, in float64."""
    model = MODELS["torchvision Swin"].model().double().eval()
    x = images()()[0].double()
    rows = wc.measure(model, x)
    attention = model.features[1][0].attn
    with torch.no_grad():
        tokens = model.features[1][0].norm1(model.features[0](x))
        windows = tokens.unfold(1, 4, 4).unfold(2, 4, 4).permute(0, 1, 2, 4, 5, 3).reshape(-1, 16, 16)
        q, k, v = attention.qkv(windows).reshape(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / 8**0.5 + attention.get_relative_position_bias()).softmax(-1)
    for row in [row for row in rows if row.module == "features.1.0.attn"]:
        matrices = weights if row.site == "attention.weights" else weights @ v
        assert row.samples == len(windows)
        assert row.kappa == pytest.approx(torch.linalg.cond(matrices[:, row.head]).mean().item(), rel=1e-6)


# ---------------------------------------------------------------------------------------------------- detectors


@pytest.mark.parametrize("name", DETECTORS)
@torch.no_grad()
def test_padding_pixels_are_no_tokens(name):
    model = built(name)
    (site,) = wc.condition_(model).sites
    seen = seen_by_conditioner(model)
    model([image(32, 40), image(64, 32, seed=1)])
    ((x, mask, y),) = seen
    height, width = (edge // patch for edge, patch in zip((64, 64), site.patch, strict=True))
    grid = mask[:, site.prefix :].view(2, height, width)
    assert mask[:, : site.prefix].all()
    # min_size=32: the first stays 32×40, the second is 64×32, both padded to 64×64.
    assert grid[0].sum() == (32 // site.patch[0]) * -(-40 // site.patch[1])
    assert grid[1].sum() == (64 // site.patch[0]) * (32 // site.patch[1])
    assert grid[0, 0].sum() == 40 // site.patch[1]
    assert wc.spectrum(y, mask).kappa_pinv.max() <= 2.002
    assert torch.equal(y[~mask], x[~mask])


@pytest.mark.parametrize("name", ["Swin", "ViT"])
@pytest.mark.parametrize("scope", ["sample", "static"])
@torch.no_grad()
def test_tokens_of_an_image_do_not_depend_on_the_size_of_its_neighbour(name, scope):
    """Patches do not overlap here, so that not even the baseline's tokens do, nor may the conditioned ones."""
    model = built(name)
    if name == "ViT":
        nn.init.zeros_(
            model.backbone.body.model.pos_embed
        )  # else resampled to the padded size, in the baseline too
    wc.condition_(model, wc.ConditioningConfig(scope=scope, sigma=3.0 if scope == "static" else None))
    (hook,) = token_hooks(model)
    kept = []
    hook.transform.register_forward_hook(lambda module, args, y: kept.append((hook, y, hook.mask_of(y))))
    small = image(32, 40)
    model([small])
    for other in (image(32, 40, seed=1), image(64, 32, seed=1), image(32, 96, seed=1)):
        model([small, other])
    alone, *together = [y[0][mask[0]] for _, y, mask in kept]
    for tokens in together:
        torch.testing.assert_close(tokens, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_without_the_mask_they_would():
    """The test above can fail: as soon as padding counts as tokens, neighbours matter."""
    model = built("Swin")
    wc.condition_(model.backbone)  # by itself the backbone knows nothing of padding
    seen, small = seen_by_conditioner(model), image(32, 40)
    model([small])
    model([small, image(64, 32, seed=1)])
    alone, together = (
        y[0].view(-1, 16, 16)[:8, :10] if y.shape[1] == 256 else y[0].view(8, 16, 16)[:, :10]
        for *_, y in seen
    )
    assert (alone - together).norm() > 1e-2 * alone.norm()


@torch.no_grad()
def test_overlapping_patches_spoil_an_image_no_more_than_at_its_edge():
    """XCiT's stem overlaps and its positions know the padded size, so the baseline depends on the neighbour too.

    With equal tokens in, equal tokens come out: what differs after conditioning differed before.
    """
    model = built("XCiT Mask R-CNN")
    wc.condition_(model)
    (hook,) = token_hooks(model)
    seen = seen_by_conditioner(model)
    model([image(32, 40), image(64, 32, seed=1)])
    ((x, mask, y),) = seen
    alone = hook.transform(x[:1, mask[0]], None)
    torch.testing.assert_close(y[0][mask[0]], alone[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_compiled_backbone_is_not_compiled_again_for_every_image_size():
    """The number of compilations is that of the plain detector, whose padded sizes vary too."""
    plain, conditioned = built("ViT"), built("ViT")
    wc.condition_(conditioned)
    expected = detections(conditioned)
    graphs = {}
    for model in (plain, conditioned):
        torch.compiler.reset()
        counted = graphs[model] = []
        model.backbone.compile(backend=functools.partial(count, counted))
        found = detections(model)
    assert len(graphs[conditioned]) == len(graphs[plain]) > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a["boxes"], b["boxes"], rtol=1e-4, atol=1e-4)


def detections(model):
    """Of an image of six sizes, each beside the same neighbour."""
    sizes = [(32, 40), (32, 44), (36, 32), (40, 32), (32, 60), (32, 61)]
    return [model([image(*size), image(64, 32, seed=1)])[0] for size in sizes]


def count(graphs, graph, inputs):
    """A backend that compiles nothing and counts."""
    graphs.append(graph)
    return graph.forward


@pytest.mark.parametrize("name", DETECTORS)
def test_training_a_detector(name):
    """Losses are finite, gradients reach the stem, and nothing of the batch is kept afterwards."""
    model = built(name).train()
    wc.condition_(model)
    pictures, targets = photographs()
    if "Mask" in name:
        for target, picture in zip(targets, pictures, strict=True):
            target["masks"] = torch.ones(1, *picture.shape[-2:], dtype=torch.uint8)
    losses = model(pictures, targets)
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    site = model.get_submodule(token_hooks(model)[0].site.module.rsplit(".", 1)[0])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in site.parameters())
    assert token_hooks(model)[0].capture.values == {}


@torch.no_grad()
def test_the_monitor_reads_a_detector_without_its_padding():
    model = built("ViT")
    wc.condition_(model)
    rows = wc.measure(model, ([image(32, 40), image(64, 32, seed=1)],))
    before, after = (next(r for r in rows if r.site == f"conditioned.{when}") for when in ("before", "after"))
    assert rows[0].kappa_pinv == after.kappa_pinv <= 2.002
    assert after.rank == before.rank <= 4 * 5 + 1
    assert before.kappa_pinv > 2.002


@torch.no_grad()
def test_the_backbone_of_a_conditioned_detector_by_itself_says_what_it_lacks():
    model = built("Swin")
    wc.condition_(model)
    with pytest.raises(RuntimeError, match="outside a call of its model"):
        model.backbone(torch.rand(1, 3, 64, 64))


def test_a_convolutional_detector_is_refused():
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    with pytest.raises(ValueError, match="no known transformer inside FasterRCNN"):
        wc.condition_(model)


@torch.no_grad()
def test_retinanet():
    torch.manual_seed(0)
    backbone = TimmBackbone("xcit_small_12_p8_224", False, **XCIT)
    anchors = AnchorGenerator(((16, 32),), ((1.0,),))
    model = RetinaNet(backbone, 3, min_size=32, max_size=96, anchor_generator=anchors).eval()
    wc.condition_(model)
    seen = seen_by_conditioner(model)
    model([image(32, 40), image(64, 32, seed=1)])
    ((_, mask, y),) = seen
    assert not mask.all()
    assert wc.spectrum(y, mask).kappa_pinv.max() <= 2.002
