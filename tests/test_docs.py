"""The documentation is true: its Python runs, prints what the page shows, and the site builds without a warning."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


PAGES = sorted(DOCS.rglob("*.md"))
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.fixture
def untouched_registry() -> Iterator[None]:
    """A page may register models of its own."""
    from wellcond.sites import REGISTRY

    models, attentions = dict(REGISTRY.models), dict(REGISTRY.attentions)
    yield
    REGISTRY.models, REGISTRY.attentions = models, attentions


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs_and_prints_what_the_page_shows(
    page: Path, untouched_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page are one program; a ``text`` block right after one is what that one prints."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "documentation"}
    found = blocks(page)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        source = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(source, space)
        if after is not None and after.language == "text":
            assert printed.getvalue().split() == after.text.split(), f"{page}, line {after.line}"


def commands() -> list[tuple[Path, int, list[str]]]:
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                lines = block.text.replace("\\\n", " ").splitlines()
                found += [
                    (page, block.line + i, shlex.split(line)) for i, line in enumerate(lines) if line.strip()
                ]
    return found


def test_commands_exist_and_take_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of ``wellcond`` or of the LRA's generator is parsed by the real command line, the work taken out."""
    pytest.importorskip("tyro")
    from wellcond import cli
    from wellcond.data.lra import __main__ as lra

    def without_work(command: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(command)(lambda *args, **kwargs: 0)

    for module in (cli, lra):
        idle = {name: without_work(command) for name, command in module.COMMANDS.items()}
        monkeypatch.setattr(module, "COMMANDS", idle)
    others = {"pip", "torchrun", "accelerate", "make"}
    for page, line, words in commands():
        if words[0] == "wellcond":
            assert cli.main(words[1:]) == 0, f"{page}, line {line}"
        elif words[:3] == ["python", "-m", "wellcond.data.lra"]:
            assert lra.main(words[3:]) == 0, f"{page}, line {line}"
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), f"{page}, line {line}"
        else:
            assert words[0] in others, f"{page}, line {line}: {words[0]} is not tested"


def test_every_fence_has_a_language_that_is_tested() -> None:
    known = {"python", "text", "bash"}
    for page in PAGES:
        opened = re.findall(r"^```(\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(opened[::2]) <= known, page
        assert len(opened) == 2 * len(blocks(page)), page


def test_every_public_name_is_in_the_reference() -> None:
    import wellcond
    from wellcond import theory

    entries = set(
        re.findall(
            r"^::: ([\w.]+)$", "".join(p.read_text() for p in (DOCS / "api").glob("*.md")), re.MULTILINE
        )
    )
    public = {f"wellcond.{name}" for name in wellcond.__all__} | {
        f"wellcond.theory.{name}" for name in theory.__all__
    }
    shadowed = {
        "wellcond.leak": "wellcond.leak.leak"
    }  # a module of the same name hides the function from the tool
    assert {shadowed.get(name, name) for name in public} <= entries


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Strict: a broken link, a missing anchor or a page outside the navigation is an error."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    built = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"""<(?:script|link)[^>]+(?:src|href)=["'](?:https?:)?//(?!wellcond)""", built)


def test_pictures_are_the_ones_that_are_drawn() -> None:
    """Every picture that a page shows is drawn by docs/draw.py, and every drawn one is shown."""
    shown = {
        match
        for page in PAGES
        for match in re.findall(r"pictures/([\w-]+)\.svg", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.stem for path in (DOCS / "pictures").glob("*.svg")}
