"""Pickles that torch and Megatron exchange: `reader.py` (start here) reads them as plain values, `writer.py` writes
what ranks send; it opens with the list of what a pickle may hold.
"""
