"""Models that no library has."""
