"""Compiled modules: asynchronous file I/O, and optimizer steps on CPU and CUDA."""
