"""The OpenAI-compatible endpoint of the rollout process: agents ask here, and what they are answered becomes samples.

Open `server.py` first.
"""
