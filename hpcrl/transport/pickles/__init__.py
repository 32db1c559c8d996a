"""Pickles of other processes and of checkpoints, read by a list.

`records.py` (start here) is the list of the classes that they may hold, `plain.py` reads and writes them, `values.py`
has the functions that make a value from its parts, and `torch_patches.py` has torch and vLLM use all this.
"""
