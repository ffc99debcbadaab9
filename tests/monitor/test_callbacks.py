"""The monitor in the trainers people use: the same rows at the same steps, none twice after a resume."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wellcond as wc
from wellcond.monitor import JsonLines, read_lines

BATCH = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    wc.condition_(model)
    return model


def plain_loop(steps: int, rate: float) -> list[wc.Row]:
    model = encoder()
    monitor = wc.ConditioningMonitor(model, every=2, batch=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    monitor.after_step(0)
    for step in range(1, steps + 1):
        model.train()
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()
        monitor.after_step(step)
    return monitor.rows


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path) if line["site"] == "tokens"]


def fit_lightning(folder: Path, steps: int, resume: Path | None = None, accumulate: int = 1) -> Path:
    lightning = pytest.importorskip("lightning.pytorch")
    from wellcond.monitor.lightning import LightningMonitor

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.encoder(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    monitor = wc.ConditioningMonitor(
        module.encoder, every=2, batch=BATCH, sink=JsonLines(folder / "rows.jsonl")
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        callbacks=[LightningMonitor(monitor)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=accumulate,
    )
    images = TensorDataset(BATCH.repeat(4 * accumulate, 1, 1))
    trainer.fit(module, DataLoader(images, batch_size=4), ckpt_path=resume)
    assert trainer.global_step == steps
    checkpoint = folder / f"{steps}.ckpt"
    trainer.save_checkpoint(checkpoint)
    return checkpoint


@pytest.mark.filterwarnings("ignore")
def test_lightning_measures_what_the_plain_loop_does(tmp_path: Path) -> None:
    fit_lightning(tmp_path, 4)
    expected = plain_loop(4, 0.1)
    found = read_lines(tmp_path / "rows.jsonl")
    assert steps_of(tmp_path / "rows.jsonl") == [0, 2, 4]
    assert len(found) == len(expected)
    for line, row in zip(found, expected, strict=True):
        assert (line["step"], line["site"], line["head"]) == (row.step, row.site, row.head)
        assert line["sigma_max"] == pytest.approx(row.sigma_max, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_lightning_counts_optimizer_steps_and_repeats_none_after_a_resume(tmp_path: Path) -> None:
    checkpoint = fit_lightning(tmp_path, 2, accumulate=2)
    assert steps_of(tmp_path / "rows.jsonl") == [0, 2]
    fit_lightning(tmp_path, 4, resume=checkpoint, accumulate=2)
    assert steps_of(tmp_path / "rows.jsonl") == [0, 2, 4]


class Repeated(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"src": BATCH[index % 4]}


def fit_transformers(folder: Path, steps: int, resume: Path | None = None) -> Path:
    transformers = pytest.importorskip("transformers")
    from wellcond.monitor.trainer import MonitorCallback

    class Squares(transformers.Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Tensor], *args: object, **kwargs: object
        ) -> Tensor:
            loss: Tensor = model(inputs["src"]).square().mean()
            return loss

    model = encoder()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    monitor = wc.ConditioningMonitor(model, every=2, batch=BATCH, sink=JsonLines(folder / "rows.jsonl"))
    trainer = Squares(
        model=model, args=arguments, train_dataset=Repeated(), callbacks=[MonitorCallback(monitor)]
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return folder / f"checkpoint-{steps}"


def test_the_trainer_counts_optimizer_steps_and_repeats_none_after_a_resume(tmp_path: Path) -> None:
    checkpoint = fit_transformers(tmp_path, 2)
    assert steps_of(tmp_path / "rows.jsonl") == [0, 2]
    fit_transformers(tmp_path, 4, resume=checkpoint)
    assert steps_of(tmp_path / "rows.jsonl") == [0, 2, 4]


def test_without_a_batch_both_say_what_is_missing() -> None:
    pytest.importorskip("lightning.pytorch")
    from wellcond.monitor.lightning import LightningMonitor
    from wellcond.monitor.trainer import MonitorCallback

    for callback in (LightningMonitor, MonitorCallback):
        with pytest.raises(ValueError, match=r"ConditioningMonitor\(model, batch=\.\.\.\)"):
            callback(wc.ConditioningMonitor(nn.Identity()))
