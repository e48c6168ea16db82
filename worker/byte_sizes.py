"""Reads numbers of bytes as people write them: ``24e9``, ``24GB``, ``1.5 GiB``."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes of ``24e9``, ``24GB`` or ``24GiB``; ValueError with a sentence for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes: write 24e9, 24GB or 24GiB")
    try:
        return (
            int(found[1]) * _UNITS[found[2]]
            if found[1].isdigit()
            else round(float(found[1]) * _UNITS[found[2]])
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no number of bytes") from error
