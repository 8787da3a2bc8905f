"""Trains tiny models under random faults: each matches an undisturbed training bit for bit, or raises a clear error.

    python bench/campaign.py                      # 10,000 trainings; about 80 minutes on 2 cores
    python bench/campaign.py --runs 300           # minutes
    python bench/campaign.py --show 4711          # one training, with its setting and fault

The number of a training is the seed of its fault: kill -9 at a random request, system call or moment; SIGSTOP; full
file systems; failed, short, refused and slow transfers; truncated files; flipped bits; failed syncs; too little memory;
a clock that jumps. Durable trainings resume after the fault, and may be killed again. Each verdict is a line of
--journal; numbers with a verdict on the same code are skipped. Exits with 1 if a training failed. Writes
bench/results/campaign.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faults
import harness
import infinity
from faults.cases import draw
from faults.judge import Judge, Verdict
from report.page import publish

MEMORY = "/dev/shm"


def arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__, "campaign")
    parser.add_argument("--runs", type=int, default=10_000, help="trainings, numbered from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--jobs", type=int, default=harness.cores(), help="trainings at once")
    parser.add_argument("--journal", type=Path, help="file of verdicts, which a later command continues")
    parser.add_argument("--nvme-path", default=MEMORY, help="folder for the files of trainings")
    parser.add_argument("--show", type=int, help="run the training of this number, and print its setting and fault")
    return parser.parse_args()


def show(judge: Judge, number: int) -> int:
    case = draw(number)
    print(case.setting, case.fault, sep="\n")
    verdict = judge.judge(case)
    print(verdict)
    return int(verdict.failed)


def digest_of_code() -> str:
    """Return a digest of the package, its compiled modules included, and of the faults."""
    digest = hashlib.sha256()
    for folder in (Path(infinity.__file__).parent, Path(faults.__file__).parent):
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so")):
            digest.update(f"{path.relative_to(folder.parent)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def known(journal: Path | None, code: str) -> dict[int, Verdict]:
    """Return the verdicts of a journal on the same code, without a last line that was cut short."""
    found, others = {}, 0
    for text in journal.read_text().splitlines() if journal is not None and journal.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line.pop("code", None) == code:
            found[line["seed"]] = Verdict(**line)
        else:
            others += 1
    if others:
        print(f"{journal}: verdicts on other code, not counted: {others:,}", file=sys.stderr, flush=True)
    return found


def run(judge: Judge, args: argparse.Namespace) -> list[Verdict]:
    """Return the verdicts of all numbers, in their order."""
    numbers, code = range(args.first, args.first + args.runs), digest_of_code()
    verdicts = {number: verdict for number, verdict in known(args.journal, code).items() if number in numbers}
    missing = [number for number in numbers if number not in verdicts]
    began = time.monotonic()
    with (args.journal or Path(os.devnull)).open("a") as journal, ThreadPoolExecutor(args.jobs) as pool:
        for count, verdict in enumerate(pool.map(lambda number: judge.judge(draw(number)), missing), 1):
            verdicts[verdict.seed] = verdict
            journal.write(json.dumps({"code": code, **asdict(verdict)}) + "\n")
            journal.flush()
            if verdict.failed:
                print(f"{verdict.seed}: {verdict.kind}: {verdict.outcome}: {verdict.text}", file=sys.stderr, flush=True)
            if count % 500 == 0 or count == len(missing):
                print(f"{count:,} of {len(missing):,} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return [verdicts[number] for number in numbers]


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts by kind of fault, and the seconds of recovery."""
    kinds: dict[str, dict[str, int]] = {}
    for each in verdicts:
        row = kinds.setdefault(each.kind, {"runs": 0, "two ranks": 0, "kills": 0, "resumed": 0})
        row["runs"] += 1
        row["two ranks"] += each.ranks > 1
        row["kills"] += each.kills
        row["resumed"] += each.resumed
        row[each.outcome] = row.get(each.outcome, 0) + 1
    failed = [[each.seed, each.kind, each.outcome, each.text] for each in verdicts if each.failed]
    return {"kinds": kinds, "failed": failed, "recovery": sorted(s for each in verdicts for s in each.recovery)}


def main() -> int:
    args = arguments()
    target = harness.target(args)
    if not args.redraw:
        with tempfile.TemporaryDirectory(prefix="infinity-campaign-", dir=args.nvme_path) as room:
            judge = Judge(room)
            if args.show is not None:
                return show(judge, args.show)
            verdicts = run(judge, args)
        found = {"args": {"runs": args.runs, "first": args.first}, **summary(verdicts)}
        harness.write_json(target, {**harness.head("campaign", path=args.nvme_path), **found})
        if found["failed"]:
            return 1
    publish(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
