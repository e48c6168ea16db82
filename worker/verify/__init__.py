"""Verification: the same tokens through paged and resident experts, and where the two part."""
