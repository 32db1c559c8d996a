"""Shapes of a run."""
