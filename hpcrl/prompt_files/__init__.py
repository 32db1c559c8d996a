"""Prompt files as rows, and whether each row has what it must: no tokenizer, no model, so a login node can look too."""
