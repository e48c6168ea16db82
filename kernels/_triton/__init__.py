"""Triton implementations."""
