"""Device functions: tensors in, tensors out; no configuration, no state."""

__version__ = "0"  # Other distributions probe a top-level `kernels` for a version; this one is ours.
