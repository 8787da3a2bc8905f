"""Layers and losses."""
