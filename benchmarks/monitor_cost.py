"""What the monitor costs: the demo's recipe with and without it, ``python benchmarks/monitor_cost.py``.

Prints the time inside the monitor in % of the rest of the training, at the default schedule; on a quiet machine.
Time inside is counted in the same run, so that the noise between two runs does not drown it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from wellcond.monitor import ConditioningMonitor
from wellcond.recipes import RECIPES
from wellcond.training import run
from wellcond.training.arms import select_arms


class TimedMonitor(ConditioningMonitor):
    """Adds up the time inside ``after_step``."""

    seconds = 0.0

    def after_step(self, step: int, batch: Any = None) -> Any:
        started = time.perf_counter()
        try:
            return super().after_step(step, batch)
        finally:
            TimedMonitor.seconds += time.perf_counter() - started


def share(arm: str, recipe: str) -> float:
    """Monitor over everything else that the Trainer does in one run, in %."""
    chosen = RECIPES[recipe]
    data = chosen.data()
    TimedMonitor.seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run.train_arm(chosen, data, select_arms([arm])[0], 0, Path(folder))
        total = time.perf_counter() - started
    return 100.0 * TimedMonitor.seconds / (total - TimedMonitor.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="digits-vit")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    run.ConditioningMonitor = TimedMonitor  # type: ignore[misc]
    for arm in ("baseline", "conditioned"):
        shares = [share(arm, options.recipe) for _ in range(options.runs)]
        print(
            f"{options.recipe}, {arm}: the monitor adds {statistics.median(shares):.1f} % "
            f"(of {', '.join(f'{s:.1f}' for s in shares)})",
            flush=True,
        )
