"""Models whose attention heads are spread over processes (tensor parallelism)."""
