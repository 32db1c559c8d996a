"""Weight updates, the trainer's side: the policy's tensors into all running engines, under a new version.

Start with `updates.py` (which engines) and `sender.py` (the phases of an update).  `pieces/` is how all of it travels
but --weight-transfer disk, which is `disk.py`; the engines' side is hpcrl/engine/.
"""
