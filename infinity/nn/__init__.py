"""Layers and losses."""

from infinity.nn.experts import TiledExperts
from infinity.nn.replace import tile
from infinity.nn.tiling import TiledLinear

__all__ = ["TiledExperts", "TiledLinear", "tile"]
