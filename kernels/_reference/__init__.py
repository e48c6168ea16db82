"""Plain-torch twins: the truth in tests and the path on a CPU."""
