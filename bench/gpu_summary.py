"""Print a table of the runs that `gpu_check.sh` makes: a GPT-2 with its states on the device, in host memory, on NVMe.

python bench/gpu_summary.py FOLDER         # with gpt2-350m-none.jsonl, -cpu and -nvme, one JSON object a step
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from harness import median
from report.page import table

WARM_UP = 3
"""Steps that are not counted."""
COLUMNS = {
    "s/step (median)": ("seconds", 1, ".3f"),
    "tokens/s": ("tokens_per_second", 1, ".0f"),
    "GB read a step": ("nvme_bytes_read", 1e9, ".2f"),
    "GB written a step": ("nvme_bytes_written", 1e9, ".2f"),
    "peak device GB": ("device_peak_bytes", 1e9, ".2f"),
    "peak host GB": ("host_peak_bytes", 1e9, ".2f"),
}
"""Key of the metrics, unit, format."""


def summary(folder: Path) -> str:
    """A row for each place of the states."""
    rows = []
    for device in ("none", "cpu", "nvme"):
        lines = (folder / f"gpt2-350m-{device}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines][WARM_UP:]
        rows.append([device, *(f"{median(steps, key) / unit:{form}}" for key, unit, form in COLUMNS.values())])
    return table(["states on", *COLUMNS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("GPT-2 of 350 M parameters, sequence 1024, batch 8, bf16, clipping 1.0.\n")
    print(summary(args.folder))


if __name__ == "__main__":
    main()
