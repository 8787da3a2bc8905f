"""Counters of an engine, and its log."""
