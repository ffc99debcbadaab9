"""The full benchmark into a dated folder of records/: ``python benchmarks/run.py`` on a quiet machine.

The same as ``wellcond bench --out records/DATE-bench``; kept here so that it also runs from a checkout
without the command installed. Exit status 1 when goal 1, 3 or 4 is missed.
"""

import argparse
import datetime
import sys
from pathlib import Path

from wellcond.bench import bench

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of every batch, below a minute")
    parser.add_argument(
        "--out", type=Path, default=None, help="default: records/DATE-bench beside this folder"
    )
    options = parser.parse_args()
    folder = Path(__file__).parent.parent / "records" / f"{datetime.date.today()}-bench"
    sys.exit(bench(quick=options.quick, out=options.out or folder))
