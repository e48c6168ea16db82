"""Placement, affinity and autoscaling: pure decisions."""
