"""The constants of residency's rules, plain numbers for the device's tables and for their replay on a host."""

from __future__ import annotations

FREQUENCY_DECAY = 0.98
"""Of an expert's use count, per step."""
RECENCY_WEIGHT = 0.1
"""LFRU: what having been used in the last step counts beside the decayed number of uses, falling with age."""
FROZEN_MARGIN = 1.4
"""While frozen, a miss takes a place only where its worth is so many times its victim's."""
THAW_SHARE = 0.75
"""The set is frozen when a step's experts exceed the places, and thawed when they fall below this share of them."""
GHOST_SHIFT = 3
"""An eighth of the usable places is the number of losses remembered: what is at stake at the margin."""
