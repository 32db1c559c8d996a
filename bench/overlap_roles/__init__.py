"""The parts of overlap.py."""
