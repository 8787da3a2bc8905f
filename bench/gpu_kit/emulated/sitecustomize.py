"""Loads the emulated accelerator of tests/late in each process of a dry run of `gpu_check.sh`."""

import os

if os.environ.get("INFINITY_TEST_DEVICE") == "late":
    import late

    late.load()
