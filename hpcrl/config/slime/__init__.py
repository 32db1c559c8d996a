"""What users of slime and vime bring: their arguments (`arguments.py`, by the table `flags.toml`; flags whose value
decides have a function in `readers.py`) and their scripts (`sandbox/slime_script.py`, run in `hpcrl/sandbox/`).

Open `arguments.py` first.
"""
