"""The rollout queue: shares of a batch from the rollout process to the trainer's data-parallel ranks, and their calls
back; and the formats of other messages between processes.

Open `server.py` (the rollout process's side) and `client.py` (a rank's) first. `share_format.py` has samples as
columns and the bytes of a share, `messages.py` all else that is said, `auth.py` who may
connect. `token_frames.py` has the requests of samples to engines, `torch_store.py` torch's store on one address, and
`pickles/` the plain types that may be unpickled.
"""
