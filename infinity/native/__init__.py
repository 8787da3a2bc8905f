"""Compiled modules: asynchronous file I/O, optimizer steps on CPU and CUDA, and signs of life of a rank."""
