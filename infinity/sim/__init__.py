"""Predicts steps from the bandwidths of a machine."""
