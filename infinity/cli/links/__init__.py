"""Measures the bandwidths that `infinity plan` predicts steps from: infinity bench-links."""
