"""The checks of the self-test, one file each, found by name."""
