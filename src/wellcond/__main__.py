"""``python -m wellcond``."""

import sys

from wellcond.cli import main

sys.exit(main())
