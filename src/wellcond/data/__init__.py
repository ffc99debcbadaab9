"""Real data: what ships with packages, and readers of local folders."""

from wellcond.data.images import Images, Split, digits

__all__ = ["Images", "Split", "digits"]
