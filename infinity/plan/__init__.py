"""Pure functions from a config and a model to layouts, formats and placement."""
