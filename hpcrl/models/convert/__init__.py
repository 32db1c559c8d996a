"""Conversions between checkpoint formats: Hugging Face <-> torch_dist, and to FP8.  Each module is one `hpcrl
convert`."""
