"""Tiles of the expert products as measured, a JSON file per device; ``kernels._triton.expert_tiles`` reads them."""
