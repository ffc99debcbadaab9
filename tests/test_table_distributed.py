"""Scope "table" in two processes: each step conditions by the weights of that step, sharded or not."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wellcond as wc
from tests.sites import language

STEPS = 3


def conditioned() -> nn.Module:
    torch.manual_seed(0)
    model = language.CAUSAL["GPT-2"]()
    wc.condition_(model)
    return model


def losses(model: nn.Module, rows: slice) -> list[torch.Tensor]:
    """Of a few steps of training, the table moving in each, and of one evaluation after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS + 1):
        ids = language.ids(8, batch=4, seed=step)[rows]
        if step == STEPS:
            model.eval()
            with torch.no_grad():
                found.append(model(ids, labels=ids, use_cache=False).loss)
            break
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def work(rank: int, folder: Path, kind: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = conditioned()
    if kind == "replicated":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.get_submodule("transformer.h").children():
            fully_shard(block)
        wrapped = fully_shard(model)
    mean = torch.stack(losses(wrapped, slice(2 * rank, 2 * rank + 2)))
    dist.all_reduce(mean)
    if rank == 0:
        torch.save(mean / 2, folder / "losses.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_train_like_one(kind: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(tmp_path, kind), nprocs=2)
    expected = torch.stack(losses(conditioned(), slice(None)))
    torch.testing.assert_close(torch.load(tmp_path / "losses.pt"), expected, rtol=1e-5, atol=1e-5)
