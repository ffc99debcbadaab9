"""``python -m tests.training.killing FOLDER``: runs that are killed and go on, each in a process of its own.

This process imports everything, trains nothing and forks, because importing takes longer than a tiny run.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.training.tiny import tiny_data, tiny_model, tiny_recipe
from wellcond.training.arms import select_arms
from wellcond.training.checkpoints import last_checkpoint
from wellcond.training.train import train

STEPS = 6
MANY_STEPS = 120
"""Kills within 50 file operations of a start, about 10 to a checkpoint, cannot use them up."""

KILLS = 24
AT_EVENT = 20
"""So many of the kills come at one of the first file operations of a process; the others after some time.

Only the first kind is certain to hit: how far a run gets in a time is the machine's affair."""


def run(
    folder: Path, arm: str, steps: int = STEPS, progress: Callable[[int, int], None] | None = None
) -> None:
    train(
        tiny_recipe(epochs=-(-steps // 4), evaluations=steps, measurements=steps // 2),
        select_arms([arm])[0],
        3,
        folder,
        data=tiny_data(),
        command="killed",
        max_steps=steps,
        save_every=1,
        resume=True,
        progress=progress,
    )


def forked(work: Callable[[], None]) -> int:
    """Run in a process of its own; the signal that ended it, 0 if it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a run ended with an error, see above")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_at_event(folder: Path, number: int) -> None:
    """kill -9 at the number-th time that a file in the folder is opened, renamed, removed or made."""
    seen = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(folder) in str(
            args[0]
        ):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def check_loadable(folder: Path) -> int:
    """The newest checkpoint loads in every part; its step, 0 if there is none yet."""
    checkpoint = last_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        return 0
    tiny_model().load_state_dict(load_file(checkpoint / "model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.load(checkpoint / name, weights_only=False)
    return int(checkpoint.name.split("-")[1])


def resume_once(folder: Path, arm: str) -> None:
    """FOLDER/whole without a stop; FOLDER/killed with kill -9 in step 4, then on."""

    def kill(step: int, steps: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    os.environ["BATCHES"] = str(folder / "whole.txt")
    forked(lambda: run(folder / "whole", arm))
    os.environ["BATCHES"] = str(folder / "killed.txt")
    assert forked(lambda: run(folder / "killed", arm, progress=kill)) == signal.SIGKILL
    assert check_loadable(folder / "killed") == 3
    forked(lambda: run(folder / "killed", arm))


def kill_often(folder: Path) -> None:
    """FOLDER/often: one run killed again and again at random points; after each the last checkpoint must load."""
    del os.environ["BATCHES"]
    chance = random.Random(0)
    steps = MANY_STEPS
    forked(lambda: run(folder / "often-whole", "conditioned", steps))
    killed, before = 0, 0
    for i in range(KILLS):
        number, seconds = chance.randint(1, 50), chance.uniform(0.02, 0.4)

        def work(i: int = i, number: int = number, seconds: float = seconds) -> None:
            if i < AT_EVENT:
                kill_at_event(folder / "often", number)
            else:
                signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM without a handler kills like -9
            run(folder / "often", "conditioned", steps)

        how = forked(work)
        step = check_loadable(folder / "often")
        assert step >= before, (before, step)
        print(f"kill {i}: signal {how}, last checkpoint {step}", flush=True)
        before = step
        killed += how != 0
    assert killed >= AT_EVENT, f"the run was over after {killed} kills"
    forked(lambda: run(folder / "often", "conditioned", steps))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for arm in ("baseline", "static"):
        (folder / arm).mkdir()
        resume_once(folder / arm, arm)
    kill_often(folder)
