"""What holds for the package as a whole."""

import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import wellcond

ROOT = Path(__file__).parent.parent


def test_import_needs_torch_only():
    code = """
import sys, torch
before = set(sys.modules)
import wellcond
foreign = {name.split(".")[0] for name in set(sys.modules) - before} - {"wellcond", "torch"} - sys.stdlib_module_names
sys.exit(", ".join(sorted(foreign)) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wellcond.__version__ == project["version"]


def test_it_is_installed_with_its_types():
    files = {str(file) for file in importlib.metadata.files("wellcond") or []}
    assert files
    assert (Path(wellcond.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", wellcond.__all__)
def test_public_names_are_documented(name):
    value = getattr(wellcond, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)
        assert value.__module__.startswith("wellcond.")


def test_lower_floors_never_import_higher_ones():
    floors = [
        "statistics",
        "linalg",
        "tokens",
        "sites",
        "hooks",
        "attach",
        "monitor",
        "report",
        "training",
        "cli",
    ]
    level = {name: i for i, name in enumerate(floors)}
    source = ROOT / "src" / "wellcond"
    for path in source.rglob("*.py"):
        place = path.relative_to(source).parts[0].removesuffix(".py")
        if place not in level:
            continue
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("wellcond."):
                used = words[1].split(".")[1]
                assert level.get(used, -1) <= level[place], f"{path}: {line.strip()}"
