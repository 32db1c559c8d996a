"""Weight updates, the trainer's side: the policy's tensors into all running engines, under a new version.

Start with `updates.py` (which engines) and `sender.py` (the phases of an update).  `transports/` carry whole tensors,
`pieces/` is --weight-update resharded and delta; the engines' side is hpcrl/engine/.
"""
