"""Prompts: files read, rendered and encoded, and the source that hands groups out in order.

Open `prompt_source.py` first, then `prompt_files.py`.
"""
