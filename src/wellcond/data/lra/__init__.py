"""The Long Range Arena, arXiv 2011.04006: two tasks generated here, three read from where they are published."""
