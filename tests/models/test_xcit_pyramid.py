"""Feature pyramids on timm's transformers, and the detectors on them."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import wellcond as wc
from wellcond.hooks import token_hooks
from wellcond.models.mask_rcnn import faster_rcnn, mask_rcnn, roi_pool
from wellcond.models.xcit_positions import OwnPositions, use_own_positions_
from wellcond.models.xcit_pyramid import TokenPyramid, xcit_body
from wellcond.recipes.maskrcnn_coco import MEDIUM, SMALL, coco_mask_rcnn

SMALL_XCIT: dict[str, Any] = {"embed_dim": 32, "depth": 4, "num_heads": 2}
BODIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "XCiT, patches of 16": ("xcit_nano_12_p16_224", SMALL_XCIT, (0, 1, 2, 3)),
    "XCiT, patches of 8": ("xcit_nano_12_p8_224", SMALL_XCIT, (0, 1, 2, 3)),
    "ViT": (
        "vit_tiny_patch16_224",
        {"embed_dim": 32, "depth": 4, "num_heads": 2, "dynamic_img_size": True},
        (0, 1, 2, 3),
    ),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {
            "embed_dim": 16,
            "depths": (1, 1, 1, 1),
            "num_heads": (1, 2, 4, 8),
            "window_size": 4,
            "strict_img_size": False,
        },
        (0, 1, 2, 3),
    ),
}


def body_of(name: str) -> nn.Module:
    timm_name, options, _ = BODIES[name]
    model: nn.Module = timm.create_model(timm_name, **options)
    return model


def tiny_detector(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    body = timm.create_model("xcit_nano_12_p16_224", embed_dim=96, num_heads=4, depth=4)
    pyramid = TokenPyramid(body, (0, 1, 2, 3), channels=32)
    options = {"min_size": 96, "max_size": 1000, "box_features": 32, "mask_widths": (16,)} | options
    return mask_rcnn(pyramid, 3, **options).eval()


# ------------------------------------------------------------------------------------------------------- the pyramid


@pytest.mark.parametrize("name", BODIES)
@torch.no_grad()
def test_strides_whatever_the_transformer(name: str) -> None:
    pyramid = TokenPyramid(body_of(name), BODIES[name][2], channels=24).eval()
    maps = pyramid(torch.rand(2, 3, 64, 128))
    sizes = {"0": (16, 32), "1": (8, 16), "2": (4, 8), "3": (2, 4), "pool": (1, 2)}
    assert {key: tuple(x.shape) for key, x in maps.items()} == {
        k: (2, 24, *size) for k, size in sizes.items()
    }


@pytest.mark.parametrize("name", BODIES)
def test_every_parameter_is_learnt(name: str) -> None:
    """One without a gradient would stop DistributedDataParallel."""
    pyramid = TokenPyramid(body_of(name), BODIES[name][2], channels=8)
    sum(x.square().mean() for x in pyramid(torch.rand(2, 3, 64, 64)).values()).backward()  # type: ignore[union-attr]
    assert [key for key, p in pyramid.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_maps_are_of_the_blocks_that_were_named() -> None:
    body = body_of("XCiT, patches of 16").eval()
    whole = copy.deepcopy(body)
    pyramid = TokenPyramid(body, (0, 2, 3), strides=(8, 16, 32), channels=8).eval()
    seen: list[Tensor] = []
    for change in pyramid.resample:
        change.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.rand(1, 3, 64, 64)
    pyramid(x)
    expected = whole.forward_intermediates(x, intermediates_only=True)  # type: ignore[operator]
    for found, block in zip(seen, (0, 2, 3), strict=True):
        assert torch.equal(found, expected[block])


def test_the_layers_between_strides_are_those_of_xcit() -> None:
    """[source] detection/backbone/xcit.py: fpn1 to fpn4 for patches of 16."""
    pyramid = TokenPyramid(body_of("XCiT, patches of 16"), (0, 1, 2, 3))
    kinds = [
        [type(m).__name__ for m in level.modules()][1:] or [type(level).__name__]
        for level in pyramid.resample
    ]
    assert kinds == [
        ["ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"],
        ["ConvTranspose2d"],
        ["Identity"],
        ["MaxPool2d"],
    ]


@pytest.mark.parametrize(
    ("blocks", "strides", "message"),
    [
        ((0, 1, 2), (4, 8, 16, 32), "must be as many"),
        ((0, 2, 1, 3), (4, 8, 16, 32), "the blocks in order"),
        ((0, 1, 2, 4), (4, 8, 16, 32), "there is no block 4: Xcit has 4, from 0"),
        ((0, 1, 2, 3), (8, 4, 16, 32), "from fine to coarse"),
        ((0, 1, 2, 3), (4, 8, 16, 24), "stride 24 is no power of two times the block's stride 16"),
    ],
)
def test_what_does_not_fit_is_refused(blocks: Any, strides: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenPyramid(body_of("XCiT, patches of 16"), blocks, strides)


def test_models_without_intermediates_and_images_without_padding_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear has no forward_intermediates"):
        TokenPyramid(nn.Linear(2, 2), (0,))
    pyramid = TokenPyramid(body_of("XCiT, patches of 16"), (0, 1, 2, 3))
    with pytest.raises(ValueError, match="64×48 pixels are no multiples of the stride 32"):
        pyramid(torch.rand(1, 3, 64, 48))


# --------------------------------------------------------------------------------------------------- pretrained weights


def original_names(state: dict[str, Tensor]) -> dict[str, Any]:
    """As XCiT's authors saved them, before timm gave the positions another name."""
    return {"model": {key.replace("pos_embed.", "pos_embeder."): value for key, value in state.items()}}


@pytest.mark.parametrize("kind", ["timm", "safetensors", "original"])
def test_weights_from_a_file(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT)
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pth")
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(source.state_dict(), str(path))
    else:
        state = source.state_dict()
        torch.save(original_names(state) if kind == "original" else state, path)
    torch.manual_seed(2)
    model = xcit_body("xcit_nano_12_p16_224", weights=path, drop_path_rate=0.05, **SMALL_XCIT)
    loaded = model.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in source.state_dict().items())
    assert model.blocks[0].drop_path1.drop_prob == 0.05  # type: ignore[union-attr, index]


def test_weights_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of weights"):
        xcit_body("xcit_nano_12_p16_224", weights=tmp_path / "none.pth")
    torch.save(timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT).state_dict(), tmp_path / "small.pth")
    with pytest.raises(
        ValueError, match=r"small\.pth has no weights that fit xcit_nano_12_p16_224: .*blocks\.4"
    ) as found:
        xcit_body("xcit_nano_12_p16_224", weights=tmp_path / "small.pth")
    assert len(str(found.value)) < 900
    for name in ("text.pth", "text.safetensors"):
        (tmp_path / name).write_text("no weights")
        with pytest.raises(ValueError, match=rf"{name} has no weights that fit"):
            xcit_body("xcit_nano_12_p16_224", weights=tmp_path / name)


# -------------------------------------------------------------------------------------------------------- the detectors


@torch.no_grad()
def test_regions_are_pooled_at_the_right_scale_whatever_the_first_image_was() -> None:
    """torchvision's own guess from an image of 33 pixels, padded to 64, is 1/2 for 1/4."""
    from torchvision.ops import MultiScaleRoIAlign

    pyramid = tiny_detector().backbone
    maps = {str(i): torch.rand(1, 32, 64 // s, 64 // s) for i, s in enumerate(pyramid.strides)}  # type: ignore[arg-type]
    guessing = MultiScaleRoIAlign(list(maps), 7, 2)
    guessing(maps, [torch.tensor([[0.0, 0.0, 9.0, 9.0]])], [(33, 33)])
    assert guessing.scales == [0.5, 0.25, 0.125, 0.0625]
    assert roi_pool(pyramid, 7).scales == [0.25, 0.125, 0.0625, 0.03125]  # type: ignore[arg-type]
    full = MultiScaleRoIAlign(list(maps), 7, 0)
    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 64.0, 64.0]])
    expected = full(maps, [boxes], [(64, 64)])
    assert torch.equal(roi_pool(pyramid, 7)(maps, [boxes], [(64, 64)]), expected)  # type: ignore[arg-type]


def test_levels_whose_strides_do_not_double_are_refused() -> None:
    pyramid = TokenPyramid(body_of("XCiT, patches of 16"), (0, 1, 2), strides=(4, 8, 32))
    with pytest.raises(ValueError, match="strides double, but these are"):
        mask_rcnn(pyramid, 3)


@torch.no_grad()
def test_detections_come_at_the_size_of_the_image() -> None:
    model = tiny_detector(min_size=64, max_size=96, box_score_thresh=0.0)
    (found,) = model([torch.rand(3, 200, 150)])
    assert found["masks"].shape[1:] == (1, 200, 150)
    assert (found["boxes"] >= 0).all()
    assert (found["boxes"] <= torch.tensor([150, 200, 150, 200]) + 0.01).all()  # rounding of the scale


def test_training_images_keep_their_size() -> None:
    model = tiny_detector().train()
    seen: list[Any] = []
    model.transform.register_forward_hook(lambda module, args, output: seen.append(output[0].image_sizes))
    target = {"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 70, 50, dtype=torch.uint8)
    model([torch.rand(3, 70, 50)], [target])
    assert seen == [[(70, 50)]]


def test_faster_rcnn_learns_boxes_alone() -> None:
    torch.manual_seed(0)
    body = timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT)
    model = faster_rcnn(TokenPyramid(body, (0, 1, 2, 3), channels=16), 3, box_features=16)
    target = {"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    losses = model([torch.rand(3, 64, 64)], [target])
    assert "loss_mask" not in losses
    assert sum(losses.values()).isfinite()


def test_the_published_number_of_parameters() -> None:
    """44.387 million, as counted elsewhere for XCiT-S12/16 in mmdet, whose heads have no box or mask of background."""
    with torch.device("meta"):
        model = coco_mask_rcnn(SMALL)
    of_background = 4 * (1024 + 1) + (256 + 1)
    assert sum(p.numel() for p in model.parameters()) - of_background == 44_386_560


@pytest.mark.parametrize(("backbone", "depth", "drop"), [(SMALL, 12, 0.05), (MEDIUM, 24, 0.15)])
def test_the_sizes_for_coco(backbone: Any, depth: int, drop: float) -> None:
    with torch.device("meta"):
        model: Any = coco_mask_rcnn(backbone)
    blocks = model.backbone.body.blocks
    assert len(blocks) == depth
    assert {block.drop_path1.drop_prob for block in blocks} == {drop}
    assert model.backbone.blocks == [depth // 3 - 1, 5, 7, 11] if depth == 12 else [7, 11, 15, 23]
    assert model.backbone.out_channels == 256
    assert model.transform.min_size == (800,)
    assert model.transform.max_size == 1333


# --------------------------------------------------------------------------------- positions over each image's own size


@torch.no_grad()
def test_own_positions_without_padding_are_those_of_timm() -> None:
    theirs = timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT).pos_embed
    assert torch.equal(OwnPositions(theirs, 16)(2, 5, 7), theirs(2, 5, 7))


@torch.no_grad()
def test_own_positions_of_a_padded_image() -> None:
    theirs = timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT).pos_embed
    ours = OwnPositions(theirs, 16)
    ours.sizes = [(80, 112), (33, 64)]  # 5×7 tokens, and 3×4
    found = ours(2, 5, 7)
    assert torch.equal(found[0], theirs(1, 5, 7)[0])
    assert torch.allclose(found[1, :, :3, :4], theirs(1, 3, 4)[0], atol=1e-6)
    assert torch.equal(found[1, :, 4], found[1, :, 2])  # goes on with the last one
    assert torch.equal(found[1, :, :, 6], found[1, :, :, 3])
    assert torch.equal(ours(2, 5, 7), theirs(2, 5, 7))  # sizes served once


def test_sizes_that_do_not_fit_are_refused() -> None:
    ours = OwnPositions(timm.create_model("xcit_nano_12_p16_224", **SMALL_XCIT).pos_embed, 16)
    for sizes in ([(80, 112)], [(96, 112), (16, 16)]):
        ours.sizes = sizes
        with pytest.raises(ValueError, match=r"are not the 2 of 5×7 tokens"):
            ours(2, 5, 7)
    with pytest.raises(TypeError, match="Linear has no positions of XCiT's kind"):
        use_own_positions_(tiny_detector(), nn.Linear(1, 1))


@torch.no_grad()
def test_copies_are_independent_of_their_original() -> None:
    model = tiny_detector(box_score_thresh=0.0)
    pictures = [torch.rand(3, 96, 96), torch.rand(3, 96, 160)]
    expected = model(pictures)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.backbone.body.pos_embed is not model.backbone.body.pos_embed
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(twin(pictures), expected, strict=True))
        assert model.backbone.body.pos_embed.sizes is None  # type: ignore[union-attr]
    assert list(model.state_dict()) == list(tiny_detector(own_positions=False).state_dict())


# ------------------------------------------------------------------------------------------- conditioned, with padding


def pictures() -> tuple[Tensor, Tensor, Tensor]:
    """A photograph, and two larger neighbours: wider, and higher."""
    first, second = (
        torch.tensor(x).permute(2, 0, 1)[None].float() / 255 for x in load_sample_images().images
    )
    resized = nn.functional.interpolate
    wide = resized(second, (96, 224))[0]
    return resized(first, (96, 128))[0], wide, wide.mT.contiguous()


@torch.no_grad()
def test_padding_gets_no_correction() -> None:
    model = tiny_detector()
    wc.condition_(model)
    (hook,) = token_hooks(model)
    seen: list[Any] = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    picture, wide, _ = pictures()
    model([picture[:, :90], wide])  # resized to 96×137 and padded to 96×224
    ((x, mask, y),) = seen
    grid = mask.view(2, 6, 14)
    assert grid[0].sum() == 6 * 9
    assert grid[0, :, :9].all()
    assert grid[1].all()
    assert torch.equal(y[~mask], x[~mask])
    assert (y[mask] != x[mask]).any(-1).all()
    assert wc.spectrum(y, mask).kappa_pinv.max() <= 2.002


def dependence(model: nn.Module) -> float:
    """Relative change of an image's feature maps when a larger image joins it, mean over levels and neighbours."""

    def maps(batch: list[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        handle = model.backbone.register_forward_hook(lambda module, args, output: found.update(output))
        with torch.no_grad():
            model(batch)
        handle.remove()
        return found

    picture, *neighbours = pictures()
    alone = maps([picture])
    changes = []
    for neighbour in neighbours:
        together = maps([picture, neighbour])
        for level in ("0", "1", "2", "3"):
            before = alone[level][0]
            after = together[level][0, :, : before.shape[1], : before.shape[2]]
            changes.append((after - before).norm() / before.norm())
    return torch.stack(changes).mean().item()


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_are_felt_no_more_than_by_the_baseline(seed: int) -> None:
    """XCA mixes all tokens, padding too, so no arm is free of it. Conditioning must not make it worse."""
    baseline = dependence(tiny_detector(seed))
    model = tiny_detector(seed)
    wc.condition_(model)
    assert baseline > 0.05
    assert dependence(model) < 0.7 * baseline
    rescaled = tiny_detector(seed)
    wc.condition_(rescaled, wc.ConditioningConfig(rescale="frobenius"))
    assert dependence(rescaled) < 1.15 * baseline
    # Positions over the padded batch are the larger part of it, and conditioned tokens feel them most.
    padded = tiny_detector(seed, own_positions=False)
    assert dependence(padded) > baseline
