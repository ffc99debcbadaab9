"""B8: a batch may be spread over processes, a matrix of tokens may not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wellcond.linalg import polar

WORKER = """
import sys, torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from wellcond import spectrum
from wellcond.tokens import conditioned_tokens, correction

rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
for batch in (4, 1):  # one sample on two processes: the second has an empty shard
    x = torch.randn(batch, 8, 4)
    mask = torch.ones(batch, 8, dtype=torch.bool)
    mask[0, 6:] = False
    for placement in (Shard(0), Replicate()):
        spread = distribute_tensor(x, mesh, [placement])
        spread_mask = distribute_tensor(mask, mesh, [placement])
        y = conditioned_tokens(spread, spread_mask)
        assert y.placements == (placement,), y.placements
        torch.testing.assert_close(y.full_tensor(), conditioned_tokens(x, mask))
        torch.testing.assert_close(spectrum(spread).kappa.full_tensor(), spectrum(x).kappa)
        leaf = spread.detach().requires_grad_()
        correction(leaf, gradient="exact").square().sum().backward()
        plain = x.clone().requires_grad_()
        correction(plain, gradient="exact").square().sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
    for dim in (1, 2, -1):
        try:
            correction(distribute_tensor(x, mesh, [Shard(dim)]))
        except ValueError as error:
            assert "must be whole on one process" in str(error)
        else:
            raise AssertionError("sharded tokens were accepted")
dist.destroy_process_group()
"""


def test_the_correction_of_a_shard_is_not_a_shard_of_the_correction() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    whole, halves = polar(x).factor, torch.cat([polar(x[:4]).factor, polar(x[4:]).factor])
    assert (whole - halves).norm() > 0.3 * whole.norm()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_b8_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n\n".join(errors)
