"""hpcrl: reinforcement-learning post-training of language models as a plain batch job."""

__version__ = "0.1.0"
