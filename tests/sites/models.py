"""One tiny, offline, dropout-free example of every model class of the registry: the rows of the contract test.

To enter a model: add a line to MODELS. `python -m tests.sites.models` writes docs/models.md from them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.sites import language

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@dataclasses.dataclass(frozen=True)
class Example:
    """How to build a tiny model and a batch for it.

    Attributes:
        build: the model, of random weights; called under a fixed seed.
        batch: what it is called with: a tuple of arguments or a dict of keyword arguments.
        padded: from a number of padding tokens to a batch (dict) and the mask ``(B, N)`` of its real tokens;
            None where the model knows no padding.
        not_for: names of contract tests that make no sense here, each with the reason.
        layers: path of the modules that hold the layers, for FSDP.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    padded: Callable[[int], tuple[Any, Tensor]] | None = None
    not_for: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layers: str = "blocks"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def images(size: int = 32, n: int = 3) -> Callable[[], Any]:
    return lambda: (torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1)),)


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=5, **options)

    return build


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {
    "img_size": 32,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "window_size": 4,
    "drop_path_rate": 0,
}
DAVIT = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "window_size": 4}
XCIT = {k: v for k, v in VIT.items() if k != "patch_size"} | {"cls_attn_layers": 1}


def volo() -> nn.Module:
    from timm.models.volo import VOLO

    width, heads = (16, 32, 32, 32), (2, 4, 4, 4)
    return VOLO((1, 1, 1, 1), img_size=64, embed_dims=width, num_heads=heads, num_classes=5)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # zero as shipped: every test of outputs would pass
    return model


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    sizes = {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 1],
        "num_heads": [2, 4],
        "window_size": [4, 4],
    }
    return SwinTransformer(**sizes, num_classes=5, stochastic_depth_prob=0.0)


class Encoder(nn.Module):
    """An embedding, nn.TransformerEncoder, a head: what people write themselves."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(6, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def sequences() -> Any:
    return (torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(1)),)


def padded_sequences(extra: int) -> tuple[Any, Tensor]:
    (x,) = sequences()
    junk = torch.full((3, extra, 6), 7.0)
    real = torch.cat([torch.ones(3, 10, dtype=torch.bool), torch.zeros(3, extra, dtype=torch.bool)], 1)
    return {"x": torch.cat([x, junk], 1), "padding": ~real}, real


class TimmBackbone(nn.Module):
    """Features of a timm transformer for a torchvision detector."""

    def __init__(self, name: str, nhwc: bool, **options: Any) -> None:
        super().__init__()
        import timm

        self.body = timm.create_model(name, features_only=True, out_indices=(-1,), **options)
        self.nhwc = nhwc
        self.out_channels = self.body.feature_info.channels()[-1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)[-1]
        return x.permute(0, 3, 1, 2) if self.nhwc else x


def faster_rcnn(name: str = "swin_tiny_patch4_window7_224", nhwc: bool = True, **options: Any) -> nn.Module:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.faster_rcnn import AnchorGenerator, FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    backbone = TimmBackbone(name, nhwc, **(options or {**SWIN, "strict_img_size": False}))
    return FasterRCNN(
        backbone,
        min_size=32,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=2, sampling_ratio=2),
        box_head=TwoMLPHead(backbone.out_channels * 4, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        box_score_thresh=0.0,
        box_detections_per_img=5,
    )


def photographs() -> Any:
    """Two images of different size, with boxes."""
    draw = torch.Generator().manual_seed(1)
    boxes = [{"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])} for _ in range(2)]
    return [torch.rand(3, 32, 40, generator=draw), torch.rand(3, 64, 32, generator=draw)], boxes


NO_DETECTOR = {
    "export": "torchvision's detectors have data-dependent shapes and do not export",
    "compile": "torchvision's detectors break the graph dozens of times; compile the backbone",
    "checkpointing": "the detector's library has no switch for it",
}


def crammed_bert() -> nn.Module:
    from wellcond.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM

    config = CrammedBertConfig(
        vocab_size=language.VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        pad_token_id=language.PAD,
        initializer_range=0.2,
    )
    return CrammedBertForMaskedLM(config)


MODELS: dict[str, Example] = {
    "timm ViT": Example(timm_model("vit_base_patch16_224", **VIT), images()),
    "timm DeiT distilled": Example(timm_model("deit_base_distilled_patch16_224", **VIT), images()),
    "timm DINOv2 registers": Example(
        timm_model("vit_base_patch14_reg4_dinov2", **VIT, dynamic_img_size=True), images(40)
    ),
    "timm EVA": Example(timm_model("eva_giant_patch14_224", **VIT, mlp_ratio=2.0), images()),
    "timm EVA-02": Example(timm_model("eva02_base_patch14_224", **VIT), images()),
    "timm DINOv3": Example(timm_model("vit_base_patch16_dinov3", **VIT), images()),
    "timm Swin": Example(timm_model("swin_tiny_patch4_window7_224", **SWIN), images(), layers="layers"),
    "timm SwinV2": Example(timm_model("swinv2_tiny_window8_256", **SWIN), images(), layers="layers"),
    "timm Swin features": Example(
        lambda: TimmBackbone("swin_tiny_patch4_window7_224", True, **SWIN), images(), layers="body"
    ),
    "timm XCiT": Example(timm_model("xcit_small_12_p8_224", **XCIT), images()),
    "timm XCiT features": Example(
        lambda: TimmBackbone("xcit_small_12_p8_224", False, **XCIT), images(), layers="body.model.blocks"
    ),
    "timm DaViT": Example(timm_model("davit_tiny", **DAVIT), images(), layers="stages"),
    "timm VOLO": Example(volo, images(64), layers="network"),
    "torchvision ViT": Example(torchvision_vit, images(), layers="encoder.layers"),
    "torchvision Swin": Example(torchvision_swin, images(), layers="features"),
    "torchvision Faster R-CNN": Example(
        faster_rcnn, photographs, not_for=NO_DETECTOR, layers="backbone.body"
    ),
    "torch TransformerEncoder": Example(Encoder, sequences, padded=padded_sequences, layers="encoder.layers"),
    "torch TransformerEncoder, batch second": Example(
        lambda: Encoder(batch_first=False), sequences, padded=padded_sequences, layers="encoder.layers"
    ),
    **{name: Example(**fields) for name, fields in language.EXAMPLES.items()},
    "wellcond Crammed BERT": Example(
        crammed_bert, language.sentences, padded=language.padded, layers="encoder.layers"
    ),
}


def page() -> str:
    """docs/models.md as it should be."""
    from wellcond.sites import REGISTRY
    from wellcond.sites.table import models_page

    return models_page(REGISTRY, ((name, example.model()) for name, example in MODELS.items()))


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
