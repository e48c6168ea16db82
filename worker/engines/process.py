"""Sets a process up for a step loop that keeps a GPU busy: no long collections, and turns for the loop's thread."""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the others waiting. A step takes a few milliseconds, and Python's own figure is five."""


def favour_step_loop() -> None:
    """For the whole process, when everything is loaded. A full collection takes long with torch loaded, and would hold
    steps up: what is here now, stays and is not looked at again."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
