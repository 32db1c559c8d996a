"""Held-out sets: their responses, and the numbers that are made of them.

Open `evaluator.py` first; `evaluation_service.py` runs evaluations when the trainer asks for them.
"""
