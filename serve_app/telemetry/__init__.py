"""Metric names, traces and logs."""
