"""Carrying a step plan out on the device."""
