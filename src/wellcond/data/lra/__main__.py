"""``python -m wellcond.data.lra listops FOLDER``: generate ListOps or Pathfinder, or check what was generated."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from wellcond.data.lra import listops_files, pathfinder_files
from wellcond.data.lra.verifying import verify_listops, verify_pathfinder

CORES = os.cpu_count() or 1
LISTOPS, PATHFINDER = listops_files.COUNTS, pathfinder_files.COUNTS


def listops(
    folder: tyro.conf.Positional[Path],
    train: int = LISTOPS.train,
    val: int = LISTOPS.val,
    test: int = LISTOPS.test,
    seed: int = 0,
    workers: int = CORES,
) -> None:
    """Write ListOps as the Long Range Arena has it. Interrupted, the same command goes on.

    Args:
        folder: of the files, which is made.
        train: expressions in basic_train.tsv.
        val: expressions in basic_val.tsv.
        test: expressions in basic_test.tsv.
        seed: the same seed gives the same files, with any number of workers.
        workers: processes.
    """
    counts = listops_files.Counts(train, val, test)
    listops_files.write_listops(folder, counts=counts, seed=seed, workers=workers)
    print(f"ListOps: {folder}")


def pathfinder(
    folder: tyro.conf.Positional[Path],
    train: int = PATHFINDER.train,
    val: int = PATHFINDER.val,
    test: int = PATHFINDER.test,
    seed: int = 0,
    workers: int = CORES,
) -> None:
    """Write Pathfinder-32. Interrupted, the same command goes on.

    Args:
        folder: of the files, which is made.
        train: images in train.npz.
        val: images in val.npz.
        test: images in test.npz.
        seed: the same seed gives the same files, with any number of workers.
        workers: processes.
    """
    counts = pathfinder_files.Counts(train, val, test)
    pathfinder_files.write_pathfinder(folder, counts=counts, seed=seed, workers=workers)
    print(f"Pathfinder: {folder}")


def verify(folder: tyro.conf.Positional[Path]) -> None:
    """Check every sample that was generated into a folder: its answer, its length or paths, that none is there twice.

    Args:
        folder: that `listops` or `pathfinder` wrote.
    """
    checks = {"listops.json": verify_listops, "pathfinder.json": verify_pathfinder}
    for name, check in checks.items():
        if (folder / name).is_file():
            print(check(folder))
            return
    raise FileNotFoundError(f"{folder} holds neither {' nor '.join(checks)}: nothing was generated there")


COMMANDS: dict[str, Callable[..., Any]] = {"listops": listops, "pathfinder": pathfinder, "verify": verify}


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; a mistake of the user ends with one sentence and exit code 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m wellcond.data.lra", args=args)
        return 0
    except (ValueError, FileNotFoundError) as error:
        print(f"wellcond: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("wellcond: stopped; the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
