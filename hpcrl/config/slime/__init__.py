"""What users of slime and vime bring: their arguments (`arguments.py`, by the table `flags.toml`; flags whose value
decides have a function in `readers.py`) and their scripts (run by `sandbox/slime_script.py`).

Open `arguments.py` first.
"""
