"""Collectives over the ranks of one engine, in one order."""
