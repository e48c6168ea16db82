"""What the next step computes: pure decisions."""
