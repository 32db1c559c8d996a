"""Model families, one file each: how a Hugging Face model becomes a Megatron model.

Start with `family.py`, which says what a family declares, then `qwen3.py` as an example; `shared/` holds what several
are made of.  `slicing.py` cuts Hugging Face tensors into the parts of ranks. `files/` reads and writes directories of
weights, `convert/` changes their format, and `lora/` has the settings and files of an adapter.
"""
