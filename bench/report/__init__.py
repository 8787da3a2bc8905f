"""Draws pages from results: one module for each benchmark, named like its script.

Reads JSON, measures nothing. `bench/draw.py` writes tables and plots, `bench/check.py` compares figures with
`bench/limits.json`.
"""
