"""``wellcond bench``: time, guarantee, memory, scaling and peers of the polar engine, in one run."""

from wellcond.bench.run import bench

__all__ = ["bench"]
