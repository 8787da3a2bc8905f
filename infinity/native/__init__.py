"""Compiled modules: asynchronous file I/O, optimizer steps on CPU and CUDA, and heartbeats of a rank."""
