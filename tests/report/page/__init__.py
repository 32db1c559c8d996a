"""Pages of runs."""
