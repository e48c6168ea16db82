"""Routed experts: resident or paged."""
