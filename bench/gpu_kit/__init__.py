"""The kit of `gpu_check.sh`: calls of few minutes on a machine with a CUDA device, each complete in itself.

Imports the standard library only: it runs before anything is installed.
"""
