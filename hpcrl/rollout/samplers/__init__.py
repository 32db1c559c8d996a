"""Makers of samples, one kind a file; `sampler.py` says what each of them is."""
