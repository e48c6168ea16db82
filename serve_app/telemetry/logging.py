"""Sets up the logs of a process: a line per event on stderr, which Ray collects. Never of a prompt or a key."""

from __future__ import annotations

import logging
import sys

ROOMS = ("serve_app", "worker", "memory")


def configure_logging(level: str) -> None:
    """Sends what our rooms log, from ``level`` up, to stderr. A second call only changes the level."""
    for room in ROOMS:
        logger = logging.getLogger(room)
        logger.setLevel(level.upper())
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
