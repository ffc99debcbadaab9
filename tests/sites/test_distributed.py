"""Two processes on gloo compute what one does, and what they save loads into a plain model."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerState

import wellcond as wc
from tests.sites.models import MODELS
from wellcond.monitor.measuring import unwrapped
from wellcond.monitor.trainer import MonitorCallback

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")]

NAMES = ["timm ViT", "timm Swin", "torch TransformerEncoder"]


def conditioned(name: str) -> nn.Module:
    model = MODELS[name].model().train()
    wc.condition_(model)
    return model


def four_samples(name: str) -> Tensor:
    torch.manual_seed(3)
    (x,) = MODELS[name].batch()
    return torch.randn(4, *x.shape[1:])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(name: str) -> dict[str, Tensor]:
    """What one process gets from all four samples."""
    model = conditioned(name)
    loss_of(model, four_samples(name)).backward()
    return gradients(model)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first of two processes found. They start once, because starting takes longer than the work."""
    folder = tmp_path_factory.mktemp("two_processes")
    models = {name: conditioned(name) for name in NAMES}
    torch.multiprocessing.spawn(work, (folder, models), nprocs=2)
    return torch.load(folder / "result.pt", weights_only=False)


def work(rank: int, folder: Path, models: dict[str, nn.Module]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=3),
    )
    try:
        result = {
            "replicated": replicate(rank, models),
            "sharded": shard(rank, NAMES, late=False),
            "sharded, then conditioned": shard(rank, NAMES, late=True),
            "trained": train_sharded(rank, "timm ViT"),
            "late": attach_late(rank, "timm ViT"),
        }
        if rank == 0:
            torch.save(result, folder / "result.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(grad.norm() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7 * scale, name


def replicate(rank: int, models: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """The models arrive pickled, conditioned: that is how spawn works."""
    found = {}
    for name, model in models.items():
        assert wc.is_conditioned(model)
        wrapped = DistributedDataParallel(model)
        loss_of(wrapped, four_samples(name)[2 * rank : 2 * rank + 2]).backward()
        found[name] = gradients(model)
        model.zero_grad()
        # C3: two forwards, one backward
        first, second = four_samples(name)[2 * rank : 2 * rank + 2].split(1)
        (wrapped(first) - wrapped(second)).square().sum().backward()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ddp_equals_one_process(found: dict[str, Any], name: str) -> None:
    assert_equal_gradients(found["replicated"][name], alone(name))


def shard(rank: int, names: list[str], *, late: bool) -> dict[str, dict[str, Tensor]]:
    """``late``: the model is conditioned after it was sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in names:
        model = MODELS[name].model().train() if late else conditioned(name)
        for layer in model.get_submodule(MODELS[name].layers).children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if late:
            wc.condition_(model)
        loss_of(model, four_samples(name)[2 * rank : 2 * rank + 2]).backward()
        found[name] = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}
        wc.remove_(model)
        assert not wc.is_conditioned(model)
    return found


@pytest.mark.parametrize("order", ["sharded", "sharded, then conditioned"])
@pytest.mark.parametrize("name", NAMES)
def test_fsdp_equals_one_process(found: dict[str, Any], name: str, order: str) -> None:
    assert_equal_gradients(found[order][name], alone(name))


STEPS = 4


def train_sharded(rank: int, name: str) -> tuple[list[float], list[Any]]:
    """Losses of four steps of AdamW, over both processes, and what the monitor's sink was given."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = conditioned(name)
    for layer in model.get_submodule(MODELS[name].layers).children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    written: list[Any] = []
    monitor = wc.ConditioningMonitor(model, every=2, batch=four_samples(name), sink=written.append)
    callback = MonitorCallback(monitor)

    def after(step: int) -> None:
        state = TrainerState(global_step=step, is_world_process_zero=rank == 0)
        callback.on_step_end(None, state, None)  # type: ignore[arg-type]

    losses = steps_of(model, four_samples(name)[2 * rank : 2 * rank + 2], after)
    together = torch.tensor(losses) / 2
    dist.all_reduce(together)
    assert rank == 0 or not written, "only the first process writes"
    return together.tolist(), written


def steps_of(model: nn.Module, x: Tensor, after: Callable[[int], None] = lambda step: None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step + 1)
    return losses


def test_a_sharded_training_has_the_losses_of_one_process_and_is_measured(found: dict[str, Any]) -> None:
    losses, written = found["trained"]
    expected = steps_of(conditioned("timm ViT"), four_samples("timm ViT"))
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert [rows[0].step for rows in written] == [2, 4]
    assert all(rows[0].kappa_pinv <= 2.002 for rows in written)


def attach_late(rank: int, name: str) -> Any:
    """Conditioning a model that DDP and compile have already wrapped."""
    model = MODELS[name].model().train()
    wrapped = DistributedDataParallel(torch.compile(model, backend="eager"))
    wrapped(four_samples(name))
    wc.condition_(wrapped)
    loss_of(wrapped, four_samples(name)[2 * rank : 2 * rank + 2]).backward()
    return gradients(model), unwrapped(wrapped).state_dict(), wrapped.state_dict()


def test_f3_a_checkpoint_of_a_wrapped_model_loads_strict_into_a_plain_one(found: dict[str, Any]) -> None:
    name = "timm ViT"
    grads, clean, nested = found["late"]
    assert_equal_gradients(grads, alone(name))
    plain = MODELS[name].model()
    plain.load_state_dict(clean, strict=True)
    assert {key.removeprefix("module._orig_mod.") for key in nested} == set(plain.state_dict())
