"""The rollout queue: shares of a batch from the rollout process to the trainer's data-parallel ranks, and their calls
back.

Open `server.py` (the rollout process's side) and `client.py` (a rank's) first; `share_format.py` says what the bytes of
a share are, `auth.py` who is let in, `frames.py` how large a message of others may be.
"""
