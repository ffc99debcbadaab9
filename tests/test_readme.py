"""The README says only what is true."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import wellcond

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_five_lines_do_what_they_say():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    claimed = [float(number) for number in re.findall(r"#[^\d\n]*(\d+(?:\.\d+)?)", code)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    before, after = (float(line) for line in printed.getvalue().split())
    assert abs(before / claimed[0] - 1) < 0.25, "random weights and images: about"
    assert abs(after - claimed[1]) < 0.02


def test_every_name_exists():
    for name in set(re.findall(r"\bwc\.(\w+)", README)):
        assert hasattr(wellcond, name), name


def test_every_link_into_the_repository_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_table_of_cost_is_that_of_the_recorded_benchmark() -> None:
    """Nobody types these numbers."""
    (folder,) = {ROOT / found for found in re.findall(r"\((records/[\d-]+-bench)\)", README)}
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "cost_table.py", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() in README
