"""Gives a model its values unit by unit: under Init, from the meta device, or from files."""
