"""Ranks watch one another: heartbeats, and the named cause when one is lost."""
