"""The engines, seen from the rollout process: who they are, how busy, and requests to them.

Open `engine/membership/registry.py` first for who serves (its law is in the first lines), `engine_client.py` for how a
request gets to an engine and its answer back.
"""
