"""Packages that Megatron finds on a GPU's machine and a login node lacks, as modules of their names and shapes."""
