"""Collects, reduces and stores the gradients of units."""
