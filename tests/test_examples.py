"""The examples run, and show what their text says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("timm")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_condition_your_model(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = load("condition_your_model").main(steps=8)
    printed = capsys.readouterr().out
    assert accuracy.keys() == {"plain", "conditioned"}
    assert printed.count("accuracy") == 2
    after = printed.split("conditioned\n", 1)[1]
    assert all(
        float(line.rsplit("=", 1)[1]) <= 2.0 for line in after.splitlines() if line.split()[2:3] == ["tokens"]
    )
    assert "conditioned.before" in after


def test_why_ill_conditioned(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("why_ill_conditioned").main("test_vit")
    assert found["directions"][0] >= 1.0
    rank, of_constant = found["rank"]
    assert of_constant == 1
    assert rank > of_constant
    before, after = found["reach"]
    assert after < before
    assert [line[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == [
        "1",
        "2",
        "3",
        "4",
    ]


def test_every_example_is_tested_and_documented() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert names == {"condition_your_model", "why_ill_conditioned"}
    assert all(f"examples/{name}.py" in page for name in names)
