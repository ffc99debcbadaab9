"""One forward and backward of the model a shape belongs to: real size, random weights, no download."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCES = {"crammed-bert": 128, "gpt2": 1024, "nystromformer": 4096}


def build(name: str) -> nn.Module:
    """The model by its name in timm, or a language model from its configuration."""
    if name not in SEQUENCES:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model
    import transformers as hf

    if name == "crammed-bert":
        from wellcond.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM

        return CrammedBertForMaskedLM(CrammedBertConfig())
    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config())
    return hf.NystromformerForSequenceClassification(
        hf.NystromformerConfig(
            vocab_size=32,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            segment_means_seq_len=4096,
            num_landmarks=128,
            max_position_embeddings=4096,
        )
    )


def step(model: nn.Module, name: str, batch: int) -> None:
    """One forward and backward on random input."""
    if name in SEQUENCES:
        ids = torch.randint(0, 32, (batch, SEQUENCES[name]))
        labels = ids if name != "nystromformer" else torch.zeros(batch, dtype=torch.long)
        if name == "crammed-bert":
            labels = torch.where(torch.arange(ids.shape[1]) % 4 == 0, ids, -100)  # a quarter is predicted
        loss: Any = model(input_ids=ids, labels=labels).loss
    else:
        output: Tensor | tuple[Tensor, ...] = model(torch.randn(batch, 3, 224, 224))
        loss = sum(o.sum() for o in output) if isinstance(output, tuple) else output.sum()
    loss.backward()


def seconds_per_sample(name: str, batch: int, rounds: int) -> float:
    """The shortest of ``rounds`` steps, after one to warm up, divided by the batch."""
    model = build(name).train()
    best = float("inf")
    for turn in range(rounds + 1):
        start = time.perf_counter()
        step(model, name, batch)
        if turn:
            best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return best / batch


def flops_of_step(batch: int) -> float:
    """Operations of a ViT-B/16 training step, counted without running it."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model, image = build("vit_base_patch16_224"), torch.empty(1, 3, 224, 224)
        with FlopCounterMode(display=False) as counter:
            model(image).sum().backward()
    return float(counter.get_total_flops()) * batch


def flops_of_newton(batch: int, n: int, d: int) -> float:
    """Operations of ``newton`` on float32 tokens, counted without running it."""
    from torch.utils.flop_counter import FlopCounterMode

    from wellcond.newton import newton

    x = torch.empty(batch, max(n, d), min(n, d), device="meta")
    with FlopCounterMode(display=False) as counter:
        newton(x, torch.empty(batch, device="meta"), -1.0)
    return float(counter.get_total_flops())
