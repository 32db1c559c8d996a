"""What a vLLM model holds, by the names of the checkpoint, and how it is shown again."""
