"""Formulas of a run's size: memory of a rank, an engine and a host, operations, and what a GPU has."""
