"""Model families, one file each, and what they share: how a Hugging Face model becomes a Megatron model.

Start with `family.py`, which says what a family declares, then `qwen3.py` as an example.  `slicing.py` cuts Hugging
Face tensors into the parts of ranks.
"""
