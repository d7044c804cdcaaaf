"""Many requests at once: ordering, concurrency, retries, checkpoint and resume."""
