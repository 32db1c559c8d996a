"""Gated delta nets: the recurrence over packed sequences (`rule.py`), and Megatron's layer around it (`layer.py`)."""
