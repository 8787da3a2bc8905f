"""Durable runs: states whose every step survives the process, as long as the drive does."""
