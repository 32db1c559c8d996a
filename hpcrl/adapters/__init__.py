"""LoRA adapters: what they are of, their names in Megatron, in PEFT's files and at the engines, and their files.

W x becomes W x + scale B A x, where W stays as it is, and A [rank, columns of W] and B [rows of W, rank] are trained
(LoRA, arXiv:2106.09685).

Invariant: nothing here imports torch at its top, so that a login node can plan and convert.
"""
