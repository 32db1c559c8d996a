"""Python objects of other processes and of checkpoints, read as plain values.

`records.py` (start here) is the list of the classes that they may hold, `messages.py` what ranks send one another,
`reader.py` the reader of a checkpoint's `.metadata`, and `torch_patches.py` has torch and vLLM use both.
"""
