"""The transports that bench/queue.py measures: for each a producer and a consumer, run as processes of their own."""
