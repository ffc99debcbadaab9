"""What helps a decoder without a leak, at small scale: ``python explore.py`` writes ``explore.jsonl`` beside it.

One small GPT-2 on Python's topics, 400 steps, seeds 0 to 2; the arms of a seed share weights and order of data.
Finished runs are kept. The causal streaming scope is written here, not in the library: see the README for what it gave.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.data import Blocks, pydoc_topics, split_documents, train_bpe
from wellcond.table import TableConditioner

HERE = Path(__file__).parent
STEPS, BATCH, LENGTH, WIDTH, RATE, VOCABULARY = 400, 8, 128, 96, 2e-3, 1024


class Streaming:
    """X + C with row n of C from the tokens of whole chunks before n: c_n = σ₁ x_n G^{-1/2}, no token sees a later one.

    G is ``seed`` tokens' worth of the tables' Gram matrices, plus x xᵀ of every token in an earlier chunk.
    """

    def __init__(self, model: GPT2LMHeadModel, every: int, rescale: bool, seed: float = 32.0) -> None:
        self.tables = model.transformer.wte.weight, model.transformer.wpe.weight
        self.every, self.rescale, self.seed = every, rescale, seed

    @torch.no_grad()
    def operators(self, x: Tensor) -> Tensor:
        """``(B, chunks, d, d)``: rows of chunk c are multiplied by I + operator c."""
        d, k = x.shape[-1], self.every
        x = x.double()
        start = sum(self.seed / len(e) * e.double().T @ e.double() for e in self.tables)
        whole = x[:, : (x.shape[1] - 1) // k * k].unflatten(1, (-1, k))
        grams = start + torch.cat([x.new_zeros(len(x), 1, d, d), (whole.mT @ whole).cumsum(1)], 1)
        values, v = torch.linalg.eigh(grams)
        sigma = values.clamp(min=0).sqrt()
        top = sigma[..., -1:]
        inside = sigma > 1e-5 * top
        inverse = torch.where(inside, top / torch.where(inside, sigma, 1.0), 0.0)
        operator = (v * inverse[..., None, :]) @ v.mT
        if self.rescale:
            ratio = sigma.norm(dim=-1) / (sigma + top * inside).norm(dim=-1)
            eye = torch.eye(d, dtype=x.dtype)
            operator = ratio[..., None, None] * (eye + operator) - eye
        return operator

    def __call__(self, module: nn.Module, args: Any, x: Tensor) -> Tensor:
        operators = self.operators(x.detach()).float().repeat_interleave(self.every, 1)[:, : x.shape[1]]
        return x + torch.einsum("bnd,bnde->bne", x.detach(), operators)


def table(rescale: str = "none", *, positions: bool = False) -> Callable[[GPT2LMHeadModel], None]:
    """Scope table on the tokens, and on the positions too."""

    def change(model: GPT2LMHeadModel) -> None:
        for module in [model.transformer.wte] + [model.transformer.wpe] * positions:
            conditioner = TableConditioner(wc.ConditioningConfig(scope="table", rescale=rescale))  # type: ignore[arg-type]
            module.register_forward_hook(lambda m, a, x, c=conditioner: c(x, m, a[0]))

    return change


def scaled(model: GPT2LMHeadModel) -> None:
    """The control: tokens at the norm of E + C(E)."""
    conditioner = TableConditioner()

    def grow(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        conditioner.refresh(module)  # type: ignore[arg-type]
        return x / conditioner.ratio.to(x.dtype)

    model.transformer.wte.register_forward_hook(grow)


def shrunk_positions(model: GPT2LMHeadModel) -> None:
    """A control: positions smaller by what scope table makes tokens larger, tokens left alone."""
    conditioner = TableConditioner()

    def shrink(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        conditioner.refresh(model.transformer.wte)
        return x * conditioner.ratio.to(x.dtype)

    model.transformer.wpe.register_forward_hook(shrink)


ARMS: dict[str, Callable[[GPT2LMHeadModel], object]] = {
    "baseline": lambda model: None,
    "table": table(),
    "both-tables": table(positions=True),
    "shrunk-positions": shrunk_positions,
    "streaming": lambda model: model.transformer.drop.register_forward_hook(Streaming(model, 32, False)),
    "streaming-rescaled": lambda model: model.transformer.drop.register_forward_hook(
        Streaming(model, 32, True)
    ),
    "both-tables-rescaled": table("frobenius", positions=True),
    "scaled": scaled,
    "table-rescaled": table("frobenius"),
}


def build(vocabulary: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_positions=LENGTH, n_embd=WIDTH, n_layer=3, n_head=3, bos_token_id=vocabulary - 1,
            eos_token_id=vocabulary - 1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def rate(step: int) -> float:
    warm = 40
    return min(1.0, (step + 1) / warm) * (0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / STEPS))))


def run(arm: str, seed: int, train: Blocks, test: Blocks) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build(VOCABULARY)
    ARMS[arm](model)
    order = torch.cat([torch.randperm(len(train)) for _ in range(STEPS * BATCH // len(train) + 1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    started = time.process_time()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(step)
        items = [train[int(i)] for i in order[step * BATCH : (step + 1) * BATCH]]
        loss = mean_loss(model, items)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        nats, count, size = 0.0, 0, 0
        for start in range(0, len(test), 16):
            items = [test[i] for i in range(start, min(start + 16, len(test)))]
            kept = sum(int((item["labels"] >= 0).sum()) for item in items)
            nats, count = nats + mean_loss(model, items).item() * kept, count + kept
            size += sum(int(item["bytes"]) for item in items)
        ids = torch.stack([test[i]["input_ids"] for i in range(4)])
        x = tokens_of(model, ids)
    return {
        "arm": arm, "seed": seed, "loss": nats / count, "bits_per_byte": nats / size / math.log(2),
        "leak": wc.leak(model, ids), "kappa": wc.condition_number(x).mean().item(), "seconds": seconds,
    }  # fmt: skip


def mean_loss(model: GPT2LMHeadModel, items: list[dict[str, Tensor]]) -> Tensor:
    logits = model(torch.stack([item["input_ids"] for item in items]), use_cache=False).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.stack([item["labels"] for item in items]).flatten()
    )


def tokens_of(model: GPT2LMHeadModel, ids: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = model.transformer.h[0].register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    model(ids)
    handle.remove()
    return kept[0]


def main() -> None:
    documents = split_documents(pydoc_topics())
    vocabulary = train_bpe(documents.train, VOCABULARY)
    train, test = (
        Blocks(vocabulary.encode(part), LENGTH, vocabulary.bytes_per_token)
        for part in (documents.train, documents.validation)
    )
    path = HERE / "explore.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    done = {(line["arm"], line["seed"]) for line in map(json.loads, lines)}
    first = list(ARMS)[:6]  # what is asked most comes first with all its seeds
    for arms in (first, [arm for arm in ARMS if arm not in first]):
        for seed in range(3):
            for arm in arms:
                if (arm, seed) not in done:
                    with path.open("a") as file:
                        file.write(json.dumps(run(arm, seed, train, test)) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
