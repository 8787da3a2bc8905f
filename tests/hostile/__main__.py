"""Lets each attack meet its reader in a process of its own: PYTHONPATH=tests python -m hostile FOLDER > RESULTS

A line of JSON for each: {name, error: names of the error's classes, text, seconds of processors, nbytes: RSS}.
A process has `SECONDS`, and may reserve `LARGEST` more bytes of addresses than it has at first.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from hostile.attacks import ATTACKS, Attack
from hostile.readers import READERS, make_valid
from support.memory import high_water_mark

SECONDS = 60
LARGEST = 1 << 30


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_valid(folder / "valid")
    for name, reader in READERS.items():  # imports, and proof that they are valid
        reader(folder / "valid" / name)
    for number, attack in enumerate(ATTACKS):
        place = folder / f"{number:03d}"
        valid = folder / "valid" / attack.reader
        target = place / "sub" / attack.reader
        if valid.is_dir():
            shutil.copytree(valid, target)
        else:
            target.parent.mkdir(parents=True)
            shutil.copyfile(valid, target)
        attack.make(target)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _meet(attack, target)
        _, status = os.waitpid(child, 0)
        if status:
            print(
                json.dumps({"name": attack.name, "error": [f"status {status}"], "text": "", "seconds": 0, "nbytes": 0})
            )
        shutil.rmtree(place)


def _meet(attack: Attack, target: Path) -> None:
    """Print the result and end the process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    statm = Path("/proc/self/statm").read_text().split()
    present, limit = int(statm[1]) * resource.getpagesize(), int(statm[0]) * resource.getpagesize() + LARGEST
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start, classes, text = time.process_time(), [], ""
    try:
        READERS[attack.reader](target)
    except BaseException as error:  # noqa: BLE001 - the test judges the class
        classes, text = [each.__name__ for each in type(error).__mro__], str(error)
        if "InfinityError" not in classes and isinstance(error, Exception):
            text = traceback.format_exc()
    growth = max(0, high_water_mark() - present)
    seconds = time.process_time() - start
    print(json.dumps({"name": attack.name, "error": classes, "text": text, "seconds": seconds, "nbytes": growth}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
