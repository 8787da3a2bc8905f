"""Layers and losses."""

from infinity.nn.tiling import TiledLinear, tile

__all__ = ["TiledLinear", "tile"]
