"""Benchmarks a disk and searches the fastest I/O settings: infinity aio-bench, infinity tune."""
