"""An arm that leaks is judged by what it knows from prefixes alone, and the page shows both losses and the gap."""

import json
from pathlib import Path

import pytest

from tests.report.synthetic import write_run
from tests.report.test_page import Page
from wellcond.report import read_run, write_report
from wellcond.report.prefix import prefix_figure, prefix_lines
from wellcond.report.words import verdicts

ARMS = ("baseline", "conditioned", "rescaled")


def language_run(folder: Path, gap: float, worse: float, seeds: int = 3) -> Path:
    """A run whose arm "rescaled" leaks: better by 0.4 with whole blocks, ``worse`` than the baseline without."""
    write_run(folder, arms=ARMS, seeds=seeds, leaking=("rescaled",), rows=False, spectra=False)
    lines = []
    for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        base = 4.0 + 0.1 * line["seed"] + 0.002 * (line["seed"] == 1) * (line["arm"] != "baseline")
        whole, prefix = (base + worse - gap, base + worse) if line["arm"] == "rescaled" else (base, base)
        line["metrics"] |= {"whole_loss": whole, "prefix_loss": prefix, "prefix_gap": prefix - whole}
        lines.append(json.dumps(line))
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_lines_have_both_losses_their_gap_and_an_honest_difference(tmp_path: Path) -> None:
    lines = {line.arm.name: line for line in prefix_lines(read_run(language_run(tmp_path / "run", 0.6, 0.2)))}
    assert list(lines) == list(ARMS)
    assert lines["baseline"].difference is None
    assert lines["baseline"].gap.mean == 0.0
    leaking = lines["rescaled"]
    assert leaking.whole.mean == pytest.approx(3.7, abs=1e-2)
    assert leaking.prefix.mean == pytest.approx(4.3, abs=1e-2)
    assert leaking.gap.mean == pytest.approx(0.6)
    assert leaking.difference is not None
    assert leaking.difference.mean == pytest.approx(0.2, abs=1e-2)


@pytest.mark.parametrize(
    ("worse", "head", "tone"),
    [
        (0.2, "is worse than baseline when it is scored from prefixes alone.", "worse"),
        (-0.2, "is better than baseline when it is scored from prefixes alone.", "better"),
        (0.0, "no difference to baseline shown at 95 % when it is scored", "open"),
    ],
)
def test_the_verdict_on_a_leaking_arm_is_the_prefix_only_one(
    tmp_path: Path, worse: float, head: str, tone: str
) -> None:
    found = {v.arm: v for v in verdicts(read_run(language_run(tmp_path / "run", 0.6, worse)))}
    assert head in found["rescaled"].head
    assert found["rescaled"].head.startswith("rescaled (leaks the future)")
    assert found["rescaled"].tone == tone
    assert "with later tokens in view says nothing" in found["rescaled"].detail
    assert "prefix" not in found["conditioned"].head + found["conditioned"].detail


def test_one_seed_gives_no_verdict_either(tmp_path: Path) -> None:
    found = {v.arm: v for v in verdicts(read_run(language_run(tmp_path / "run", 0.6, 0.2, seeds=1)))}
    assert found["rescaled"].tone == "open"


def test_the_page_shows_both_losses_and_the_gap(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run", 0.6, 0.2)
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert page.open == []
    assert "Scored from prefixes alone" in page.text
    assert "rescaled leaks the future 3.701 4.301 +0.600 (+0.600 to +0.600) +0.201" in page.text
    assert (folder / "plots" / "prefix.png").is_file()


def test_other_tasks_have_no_such_section(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", arms=ARMS)).read_text(encoding="utf-8"))
    assert "prefixes" not in page.text


def test_no_text_of_the_figure_is_cut_off(tmp_path: Path) -> None:
    figure = prefix_figure(prefix_lines(read_run(language_run(tmp_path / "run", 0.6, 0.2))))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    whole = figure.bbox
    for text in (axes.xaxis.label, *axes.get_yticklabels(), *axes.texts):
        box = text.get_window_extent()
        assert whole.x0 <= box.x0, text
        assert box.x1 <= whole.x1, text
        assert box.y0 >= whole.y0, text
