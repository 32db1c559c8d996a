"""Prompt files as rows, and whether each row holds what it must: no tokenizer, no model, so a login node can look too.

Open `rows.py` first, then `row_checks.py`; `early_look.py` is what commands call before a run starts.
"""
