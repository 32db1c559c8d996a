"""Checkpoints of the trainer in Megatron's torch_dist layout.

Start with `save_load.py`, which has the layout of the directory; `resume.py` says where weights are loaded from.
"""
