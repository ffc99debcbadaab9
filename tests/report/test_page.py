"""The page: what it says, that it needs nothing else, and what it does when a run folder is not whole."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from tests.report.synthetic import ARMS, write_run
from wellcond.report import read_run, write_report
from wellcond.report.words import verdicts

TWO = ("baseline", "conditioned")


class Page(HTMLParser):
    """Text by line, images, links to elsewhere and headings of a page."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.attributes, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attributes for name, attributes in self.attributes if name == tag]


def page_of(folder, **options):
    return Page(write_report(write_run(folder, **options)).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("full") / "run", infinite=("baseline",)))


def test_page_is_self_contained_and_well_formed(full):
    text = full.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert text.startswith("<!doctype html>")
    assert page.all("html") == [{"lang": "en"}]
    assert {"script", "link", "iframe"}.isdisjoint(page.tags)
    assert not re.search(r"https?://|url\(|@import", text)
    sources = [image["src"] for image in page.all("img")] + [s["srcset"] for s in page.all("source")]
    for source in sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG\r\n\x1a\n")


def test_every_picture_has_alternatives_and_every_column_a_header(full):
    page = Page(full.read_text(encoding="utf-8"))
    alternatives = [image["alt"] for image in page.all("img")]
    assert len(alternatives) == 2 + 2 + 3 + 3 + len(ARMS)
    assert len(set(alternatives)) == len(alternatives)
    assert all("baseline" in alt or alt.startswith(("singular values", "difference")) for alt in alternatives)
    assert {header["scope"] for header in page.all("th")} == {"col", "row"}


def test_verdicts_come_before_the_table_and_follow_the_intervals(full):
    text = Page(full.read_text(encoding="utf-8")).text
    assert text.index("conditioned is better than baseline") < text.index(
        "Intervals hold with 95 % confidence"
    )
    assert "conditioned-tokens is worse than baseline" in text
    assert "scaled: no difference to baseline shown at 95 %" in text


def test_control_that_does_as_well_is_named_in_the_verdict(full):
    text = Page(full.read_text(encoding="utf-8")).text
    verdict = text[
        text.index("conditioned is better than baseline") : text.index("conditioned-tokens is worse")
    ]
    assert "No difference is shown between it and the control positions: this gain is not shown" in verdict
    assert "conditioned against positions" in text


def test_control_that_does_better_is_named_in_the_verdict(tmp_path):
    folder = write_run(tmp_path)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"]["accuracy"] += 5.0 if line["arm"] == "positions" else 0.0
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (verdict,) = [v for v in verdicts(read_run(folder)) if v.arm == "conditioned"]
    assert verdict.head == "conditioned is better than baseline."
    assert re.search(
        r"The control positions is better than it, \+\d\.\d+ \(\+\d\.\d+ to \+\d\.\d+\): this gain can be had without",
        verdict.detail,
    )


def test_page_holds_all_it_promises(full):
    text = Page(full.read_text(encoding="utf-8")).text
    run = json.loads((full.parent / "run.json").read_text())
    for wanted in (
        run["title"], run["command"], *run["hypotheses"], "optimizer.learning_rate 0.001", "torch 2.14.1",
        "invented, 2 cores", "C added after the positions.", "1.08×",
    ):  # fmt: skip
        assert wanted in text, wanted
    line = json.loads((full.parent / "summary.json").read_text())["conditioned"]
    assert f"{line['mean']:.2f} {line['low']:.2f} to {line['high']:.2f}" in text
    difference = line["difference"]
    assert f"{difference['low']:+.2f} to {difference['high']:+.2f}" in text
    assert f"{difference['effect']:+.1f}" in text


def test_infinite_kappa_is_shown_as_such_and_replaced_openly(full):
    text = Page(full.read_text(encoding="utf-8")).text
    assert "κ⁺ of tokens κ first layer κ all layers" in text
    assert "κ⁺: σ₁/σᵣ over the numerical rank r, shown for every arm where κ is infinite in one." in text
    assert text.count("κ itself is infinite (a matrix is rank-deficient) in baseline") == 2  # curves and bars
    assert "inf" not in re.findall(r"\w+", text)


def test_plots_are_flat_files_with_portable_names(full):
    files = sorted(path.name for path in (full.parent / "plots").rglob("*"))
    assert all(re.fullmatch(r"[\w.=-]+", name, re.ASCII) for name in files)
    assert {
        "result.png",
        "difference.png",
        "curve-loss.png",
        "kappa-tokens.png",
        "bars-all_layers.png",
    } <= set(files)
    assert len(files) == 2 + 2 + 3 + 3 + len(ARMS)


def test_hostile_names_are_escaped_and_make_no_folders(tmp_path):
    names = ("baseline", "<b>a/b", "a:b", "A b")
    page = page_of(tmp_path / "run", arms=names, seeds=2, rows=False)
    assert "<b>a/b" in page.text
    assert "b" not in page.tags
    files = [path.name for path in (tmp_path / "run" / "plots").rglob("spectrum*")]
    assert len({name.casefold() for name in files}) == len(names)
    assert all(re.fullmatch(r"[\w.=-]+", name, re.ASCII) for name in files)


def test_same_folder_gives_the_same_page(tmp_path):
    folder = write_run(tmp_path / "run", arms=TWO, seeds=2, layers=1, heads=1)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_one_seed_has_no_interval_and_says_so(tmp_path):
    page = page_of(tmp_path / "run", arms=TWO, seeds=1, rows=False, spectra=False)
    assert "One seed. There is no interval and no verdict" in page.text
    assert page.text.count("one seed: no interval") >= 2
    assert "better than" not in page.text
    assert "worse than" not in page.text
    assert "One seed, so no band." in page.text


def test_table_and_bars_say_the_same(full):
    page = Page(full.read_text(encoding="utf-8"))
    (alt,) = [image["alt"] for image in page.all("img") if image["alt"].startswith("bars of κ⁺ averaged")]
    kappa = re.search(r"baseline ([\d.,]+)", alt).group(1)
    assert f"baseline n/a {kappa.rstrip(',')} " in page.text


def test_without_rows_the_summary_s_kappa_is_shown(tmp_path):
    options = {"arms": TWO, "infinite": ("baseline",), "rows": False, "spectra": False}
    text = page_of(tmp_path / "run", **options).text
    assert "baseline n/a ∞ 240 2,880" in text
    assert "κ of tokens" in text


def test_missing_rows_and_spectra_are_said(tmp_path):
    page = page_of(tmp_path / "run", arms=TWO, rows=False, spectra=False)
    assert "no rows.jsonl: κ was not measured" in page.text
    assert "no spectra.json: no spectrum was saved" in page.text
    assert len(page.all("img")) == 4


def test_leaking_arm_is_flagged_everywhere(tmp_path):
    page = page_of(tmp_path / "run", arms=TWO, leaking=("conditioned",), rows=False, spectra=False)
    assert "conditioned leaks the future. Its positions see later tokens" in page.text
    assert "conditioned (leaks the future) is better" in page.text
    assert "conditioned leaks the future C added" in page.text
    assert page.text.startswith("TEST DATA: a small ViT on invented digits (leaks the future)")


def test_unfinished_runs_are_named(tmp_path):
    folder = write_run(tmp_path / "run", arms=TWO, rows=False, spectra=False)
    lines = (folder / "results.jsonl").read_text().splitlines()
    (folder / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert "1 planned run has no result: conditioned, seed 2." in Page(write_report(folder).read_text()).text


def test_single_arm_has_nothing_to_compare(tmp_path):
    page = page_of(tmp_path / "run", arms=("baseline",), rows=False, spectra=False)
    assert "nothing to compare it to" in page.text


def test_pairs_are_those_of_the_statistics(full):
    """By hand: mean ± t·s/√n of the paired differences."""
    from scipy import stats

    lines = [json.loads(line) for line in (full.parent / "results.jsonl").read_text().splitlines()]
    value = {(line["arm"], line["seed"]): line["metrics"]["accuracy"] for line in lines}
    gaps = [value["conditioned", seed] - value["positions", seed] for seed in range(3)]
    low, high = stats.t.interval(0.95, 2, sum(gaps) / 3, stats.sem(gaps))
    text = Page(full.read_text(encoding="utf-8")).text.replace("−", "-")
    assert (
        f"conditioned against positions {sum(gaps) / 3:+.2f} {low:+.2f} to {high:+.2f} no difference shown"
        in text
    )


def test_no_hypotheses_is_said(tmp_path):
    folder = write_run(tmp_path / "run", arms=TWO, spectra=False, rows=False)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "hypotheses": []}))
    assert "None were written down before this run" in Page(write_report(folder).read_text()).text


def test_template_is_in_the_wheel_configuration():
    """hatchling ships every file of the package that git does not ignore."""
    from importlib.resources import files

    assert files("wellcond.report").joinpath("report.html.jinja").is_file()
    assert shutil.which("git") is None or not _ignored("src/wellcond/report/report.html.jinja")


def _ignored(path):
    import subprocess
    from pathlib import Path

    root = Path(__file__).parents[2]
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=root, check=False).returncode == 0
