"""The parts of end_to_end.py."""
