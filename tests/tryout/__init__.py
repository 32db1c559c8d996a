"""hpcrl try, chat and serve."""
