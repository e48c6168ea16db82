"""Reads figures off a metrics page, Router by Router."""

from __future__ import annotations

import re

_LINE = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_ROUTER = re.compile(r'(?:^|,)router="([^"]*)"')


def by_router(page: str, name: str) -> dict[str, float]:
    """What each Router that the page tells of says of ``name``, over all its other labels together."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        match = _LINE.match(line) if line.startswith(name) else None
        if match is not None and match["name"] == name:
            router = _ROUTER.search(match["labels"] or "")
            who = router[1] if router is not None else ""
            found[who] = found.get(who, 0.0) + float(match["value"])
    return found
