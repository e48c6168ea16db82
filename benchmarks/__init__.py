"""Measurements with a reader."""
