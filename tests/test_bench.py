"""`wellcond bench`: what it judges and how it reports, on records made up here; nothing depends on the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond.bench import measures, models, peers, run, show
from wellcond.bench.goals import judge
from wellcond.bench.shapes import KINDS, SHAPES, Shape, matrices, rank_of
from wellcond.recipes.gpt2 import GPT2_TINY_STORIES

TINY = Shape("tiny", 3, 12, 20)


def row(name: str = "ViT-B", size: tuple[int, int, int] = (64, 196, 768), **changes: Any) -> dict[str, Any]:
    made = {
        "shape": name, "label": name, "size": list(size), "kappa": "1e4", "method": "gram", "auto": 0.1, "svd": 0.4,
        "floor": 0.05, "over_floor": 2.0, "speedup": 4.0, "reached": {"auto": 1.9998, "newton": 2.0},
    }  # fmt: skip
    return made | changes


def record(**changes: Any) -> dict[str, Any]:
    made = {
        "machine": {"processor": "one", "threads": 2, "torch": "2", "accelerator": None},
        "quick": True,
        "seconds": 1.0,
        "fallbacks": [],
        "rows": [row(), row("GPT-2 table", (1, 50257, 768))],
        "memory": [{"shape": "ViT-B", "method": "gram", "constant": 0.0, "exact": 2.5, "peak": 2.2}],
        "scaling": {
            "batch": {"seconds": {"1": 0.1, "2": 0.2}, "exponent": 1.0},
            "longer side": {"seconds": {"1": 0.1, "2": 0.2}, "exponent": 1.0},
        },
        "peers": [
            {"label": "ViT-B", "peer": "p", "seconds": 0.1, "kappa": 2.0, "error": 0.1, "gradient": "finite"}
        ],
        "steps": [{"shape": "ViT-B", "model": "vit", "share": 0.005, "allowed": 0.01}],
        "newton": {"measured": False, "flops": 1e9, "step_flops": 1e12},
    }
    return made | changes


def missed(made: dict[str, Any]) -> list[int]:
    return [goal["number"] for goal in judge(made) if goal["met"] is False]


def test_a_good_record_misses_nothing_and_says_that_the_gpu_was_not_measured() -> None:
    assert missed(record()) == []
    (second,) = [goal for goal in judge(record()) if goal["number"] == 2]
    assert second["met"] is None
    assert "not measured on a GPU" in second["found"]
    assert "0.10%" in second["found"]


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"rows": [row(speedup=2.9)]}, 1),
        ({"rows": [row(speedup=1.9), row("GPT-2 table", (1, 50257, 768), speedup=30.0)]}, 1),
        ({"rows": [row(speedup=30.0), row("GPT-2 table", (1, 50257, 768), speedup=0.99)]}, 1),
        ({"steps": [{"shape": "ViT-B", "model": "vit", "share": 0.011, "allowed": 0.01}]}, 1),
        ({"newton": {"measured": True, "flops": 1.0, "step_flops": 1.0, "svd": 1.9, "newton": 0.1}}, 2),
        ({"rows": [row(reached={"auto": 1.9, "newton": 2.0021})]}, 3),
        ({"rows": [row(reached={"auto": float("nan")})]}, 3),
        ({"memory": [{"shape": "a", "method": "gram", "constant": 2.1, "exact": 1.0, "peak": 1.0}]}, 4),
        ({"memory": [{"shape": "a", "method": "gram", "constant": 1.0, "exact": 4.1, "peak": 1.0}]}, 4),
        ({"memory": [{"shape": "a", "method": "gram", "constant": 1.0, "exact": 1.0, "peak": 3.1}]}, 4),
        ({"scaling": {"batch": {"seconds": {"1": 1.0}, "exponent": 1.5}}}, 5),
        ({"peers": []}, 6),
    ],
)
def test_each_goal_can_be_missed(changes: dict[str, Any], number: int) -> None:
    assert missed(record(**changes)) == [number]


@pytest.mark.parametrize(("changes", "code"), [
    ({}, 0),
    ({"rows": [row(speedup=0.5)]}, 1),
    ({"rows": [row(reached={"auto": 3.0})]}, 1),
    ({"memory": [{"shape": "a", "method": "gram", "constant": 9.0, "exact": 1.0, "peak": 1.0}]}, 1),
    ({"peers": []}, 0),
])  # fmt: skip
def test_exit_status_json_and_plots(
    changes: dict[str, Any], code: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(run, "measure", lambda quick, device: record(**changes))
    assert run.bench(quick=True, out=tmp_path / "new") == code
    written = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert written["goals"] == judge(record(**changes))
    for plot in ("scaling.svg", "ratios.svg"):
        assert "</svg>" in (tmp_path / "new" / plot).read_text()
    printed = capsys.readouterr().out
    assert ("MISSED" in printed) == any(goal["met"] is False for goal in written["goals"])
    assert "\x1b" not in printed


def test_explain_prints_a_choice_and_a_reason_for_every_shape(capsys: Any) -> None:
    assert run.bench(explain=True) == 0
    printed = capsys.readouterr().out
    for shape in SHAPES:
        assert shape.name.split()[0] in printed
    assert "gram" in printed


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_have_the_singular_values_they_promise(kind: Any) -> None:
    shape = Shape("wide", 3, 130, 140)
    x = matrices(shape, (kind,))[kind]
    assert x.shape == (3, 130, 140)
    assert x.dtype == torch.float32
    rank = rank_of(shape, kind)
    sigma = torch.linalg.svdvals(x.double())
    expected = 1e3 if kind == "rank" else float(kind)
    torch.testing.assert_close(
        sigma[:, 0] / sigma[:, rank - 1], torch.full((3,), expected).double(), rtol=0.2, atol=0
    )
    if rank < 130:
        assert (sigma[:, rank:] < 1e-6).all()


def test_the_shapes_are_the_issue_s() -> None:
    assert {(s.batch, s.n, s.d) for s in SHAPES} == {
        (64, 196, 768), (64, 198, 768), (16, 3136, 128), (64, 196, 512), (64, 128, 768), (4, 1024, 768),
        (1, 50257, 768), (16, 4096, 64), (2, 4165, 384),
    }  # fmt: skip


def test_kappa_sees_a_factor_that_is_wrong() -> None:
    x = matrices(TINY, ("1e4",))["1e4"]
    assert measures.kappa_reached(x, "gram", 12) <= 2.002
    sigma_max = torch.linalg.svdvals(x)[:, 0]
    assert measures.kappa_of_sum(x, torch.zeros_like(x), sigma_max, 12) == pytest.approx(1e4, rel=0.05)
    assert measures.kappa_of_sum(x, peers.muon_factor(x), sigma_max, 12) > 2.1


@pytest.mark.parametrize("method", ["svd", "gram", "newton"])
def test_memory_is_counted(method: Any) -> None:
    x = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
    assert measures.saved_ratio(x, method, "constant") == 0.0
    assert 1.0 <= measures.saved_ratio(x, method, "exact") <= 4.0
    assert measures.peak_ratio(x, method) > 1.0


def test_peers_report_what_is_theirs() -> None:
    x = matrices(TINY, ("1e4",))["1e4"]
    found = {entry["peer"]: entry for entry in peers.compare(x, 12, rounds=1)}
    assert found["wellcond auto"]["gradient"] == "finite"
    assert found["torch.linalg.svd (autograd)"]["gradient"] == "not finite"
    assert found["wellcond gram"]["kappa"] <= 2.002
    assert found["torch.optim.Muon steps"]["kappa"] > 2.1
    assert found["wellcond gram"]["error"] < 1e-5 < found["torch.optim.Muon steps"]["error"]


def test_seconds_runs_in_turns() -> None:
    order: list[str] = []
    found = measures.seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 3
    assert set(found) == {"a", "b"}


def test_flops_are_counted_without_running() -> None:
    one, two = models.flops_of_newton(1, 64, 32), models.flops_of_newton(2, 64, 32)
    assert two == 2 * one
    assert one == models.flops_of_newton(1, 32, 64)
    assert one > 20 * 2 * 2 * 64 * 32 * 32


@pytest.mark.slow
def test_models_build_and_step() -> None:
    pytest.importorskip("transformers")
    assert models.seconds_per_sample("nystromformer", 1, 1) > 0


def test_table_needs_no_terminal(capsys: Any) -> None:
    made = record(fallbacks=["done again by method='svd'"])
    show.table(made | {"goals": judge(made)})
    assert "fallback: done again" in capsys.readouterr().out


def test_a_table_is_paid_once_for_a_micro_batch_of_its_recipe() -> None:
    table = next(shape for shape in SHAPES if shape.name == "GPT-2 table")
    assert table.samples == GPT2_TINY_STORIES.micro_batch
