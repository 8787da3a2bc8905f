"""The kit of `gpu_check.sh`: independent calls of a few minutes on a machine with a CUDA device.

Imports the standard library only: it runs before anything is installed.
"""
