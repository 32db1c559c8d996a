"""Pickles that torch and Megatron exchange: `reader.py` reads them as plain values, `writer.py` writes what ranks
send."""
