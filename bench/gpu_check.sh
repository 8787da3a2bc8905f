#!/usr/bin/env bash
# Check and measure on a machine with a CUDA device and no network: right | headline | fix | kernels | nvme.
# bench/gpu_check.py describes the calls and their variables. Each takes at most eight minutes.
exec python3 -u -X faulthandler "$(dirname "$0")/gpu_check.py" "$@"
