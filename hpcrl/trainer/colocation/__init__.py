"""The trainer's side of sharing GPUs with the engines (--colocate): whose turn it is, and what leaves the GPUs in
between."""
