"""Held-out sets: their responses, and the numbers that are made of them."""
