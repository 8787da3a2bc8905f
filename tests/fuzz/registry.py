"""All kinds of parts; importing this module lists them."""

from __future__ import annotations

from fuzz import edits, layers, sharing, sometimes, weights, wrappers
from fuzz.parts import LEAVES, WRAPPERS, make_part

__all__ = ["LEAVES", "WRAPPERS", "edits", "layers", "make_part", "sharing", "sometimes", "weights", "wrappers"]
