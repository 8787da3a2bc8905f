"""Collectives over the ranks of one engine, in the same order on all ranks."""
