"""Models and the pieces of models."""
