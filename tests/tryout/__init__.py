"""hpcrl try, and a conversation with a checkpoint."""
