"""Compiled modules: asynchronous file I/O, Adam and CUDA kernels."""
