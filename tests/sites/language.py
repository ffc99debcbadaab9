"""Tiny models of transformers for tests/sites/models.py: fields of its Example by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 60
PAD = 1
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "initializer_range": 0.2,
}
SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def ids(n: int = 10, batch: int = 3, seed: int = 1) -> Tensor:
    """Token ids without padding ones."""
    return torch.randint(2, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


def sentences() -> dict[str, Tensor]:
    """Three sentences, one of them padded."""
    tokens, mask = ids(), torch.ones(3, 10, dtype=torch.long)
    mask[1, 7:] = 0
    tokens[1, 7:] = PAD
    return {"input_ids": tokens, "attention_mask": mask}


def padded(extra: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same with more padding."""
    batch = sentences()
    batch["input_ids"] = nn.functional.pad(batch["input_ids"], (0, extra), value=PAD)
    batch["attention_mask"] = nn.functional.pad(batch["attention_mask"], (0, extra))
    return batch, batch["attention_mask"].bool()


def without_cache(batch: dict[str, Any]) -> dict[str, Any]:
    """A cache in the output cannot be exported."""
    return {**batch, "use_cache": False}


def with_decoder(batch: dict[str, Any]) -> dict[str, Any]:
    return without_cache({**batch, "decoder_input_ids": ids(4, seed=2)})


def padded_source(extra: int) -> tuple[dict[str, Any], Tensor]:
    batch, real = padded(extra)
    return with_decoder(batch), real


def padded_prompt(extra: int) -> tuple[dict[str, Any], Tensor]:
    batch, real = padded(extra)
    return without_cache(batch), real


def build(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of a model of transformers from its class names; ``attn`` chooses the attention implementation."""

    def make(attn: str = "sdpa") -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options, attn_implementation=attn)
        return getattr(transformers, model)(settings)

    return make


def detr(attn: str = "sdpa") -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    model = transformers.DetrModel(
        transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=32,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_queries=5,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )
    model.encoder.set_attn_implementation(attn)  # the backbone knows only one
    return model


def nystromformer(attn: str = "eager") -> nn.Module:
    """As many landmarks as tokens: exact attention. Its convolution, which mixes padding in, is put to zero."""
    model = build(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        **BERT,
        **SPECIAL,
        num_landmarks=16,
        segment_means_seq_len=16,
        conv_kernel_size=3,
    )(attn)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.zeros_(module.weight)
    return model


def photographs() -> dict[str, Tensor]:
    """Two images, one of them padded below and to the right."""
    mask = torch.ones(2, 48, 40, dtype=torch.long)
    mask[1, 32:], mask[1, :, 24:] = 0, 0
    return {
        "pixel_values": torch.rand(2, 3, 48, 40, generator=torch.Generator().manual_seed(1)),
        "pixel_mask": mask,
    }


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "BERT": build("BertForMaskedLM", "BertConfig", **BERT),
    "RoBERTa": build("RobertaForMaskedLM", "RobertaConfig", **BERT, **SPECIAL),
    "XLM-RoBERTa": build("XLMRobertaForMaskedLM", "XLMRobertaConfig", **BERT, **SPECIAL),
    "CamemBERT": build("CamembertForMaskedLM", "CamembertConfig", **BERT, **SPECIAL),
    "ELECTRA": build("ElectraForMaskedLM", "ElectraConfig", **BERT, embedding_size=16),
    "DistilBERT": build(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCAB,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
        initializer_range=0.2,
    ),
    "Nyströmformer": nystromformer,
    "ViT": build(
        "ViTForImageClassification",
        "ViTConfig",
        **{
            k: v
            for k, v in BERT.items()
            if k not in ("vocab_size", "pad_token_id", "max_position_embeddings")
        },
        image_size=32,
        patch_size=8,
        num_labels=5,
    ),
    "DETR": detr,
    "T5": build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=PAD,
        decoder_start_token_id=0,
    ),
    "BART": build(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=0,
        init_std=0.2,
    ),
}

CAUSAL: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": build(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=40,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        **SPECIAL,
    ),
    "Llama": build("LlamaForCausalLM", "LlamaConfig", **LLAMA, **SPECIAL, tie_word_embeddings=True),
    "Mistral": build("MistralForCausalLM", "MistralConfig", **LLAMA, **SPECIAL),
    "Qwen2": build("Qwen2ForCausalLM", "Qwen2Config", **LLAMA, **SPECIAL),
    "Qwen3": build("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, **SPECIAL),
    "OPT": build(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=40,
        dropout=0.0,
        pad_token_id=PAD,
        init_std=0.2,
        **SPECIAL,
    ),
    "GPT-NeoX": build(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.2,
        **SPECIAL,
    ),
}

PADDED: dict[str, Any] = {
    **dict.fromkeys(CAUSAL, padded_prompt),
    "T5": padded_source,
    "BART": padded_source,
    "ViT": None,
    "DETR": None,
}
BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda: without_cache(sentences()) for name in CAUSAL},
    "ViT": pictures,
    "DETR": photographs,
    "T5": lambda: with_decoder(sentences()),
    "BART": lambda: with_decoder(sentences()),
}
LAYERS = {
    **dict.fromkeys(CAUSAL, "model.layers"),
    "BERT": "bert.encoder.layer",
    "ELECTRA": "electra.encoder.layer",
    "RoBERTa": "roberta.encoder.layer",
    "DistilBERT": "distilbert.transformer.layer",
    "Nyströmformer": "nystromformer.encoder.layer",
    "ViT": "vit.layers",
    "DETR": "encoder.layers",
    "T5": "encoder.block",
    "BART": "model.encoder.layers",
    "GPT-2": "transformer.h",
    "OPT": "model.decoder.layers",
    "GPT-NeoX": "gpt_neox.layers",
}
TWINS = {"XLM-RoBERTa", "CamemBERT", "Mistral", "Qwen2"}
"""The same code as another of these; their sites are tested in test_transformers.py."""

EXAMPLES: dict[str, dict[str, Any]] = {
    f"transformers {name}": {
        "build": builder,
        "batch": BATCHES.get(name, sentences),
        "padded": PADDED.get(name, padded),
        "layers": LAYERS[name],
    }
    for name, builder in {**BUILDERS, **CAUSAL}.items()
    if name not in TWINS
}
