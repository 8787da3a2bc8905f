"""Layers and losses."""

from infinity.nn.replace import tile
from infinity.nn.tiling import TiledLinear

__all__ = ["TiledLinear", "tile"]
