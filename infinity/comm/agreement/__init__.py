"""Ranks announce what they are about to do, and compare it before any of them does it."""
