"""`make mutants`: removes each guard in turn, runs its tests, and prints the outcome.

The exit status is 1 if a mutant survives that `justified.toml` gives no reason for, and 2 if one of the tables names
a file, a test or a guard that does not exist.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from mutants.sites import Mutant, find
from mutants.table import Cache, Justified, Selections, key_of, matches
from mutants.trial import Result, end_all, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "infinity"
_LATE = "tests/late"
_TEST_TIMEOUT = 60
"""Time limit of one test in seconds; a missing guard often causes a hang."""
_MOST_CHANCES = 4
"""Tests that are left out at most, because they detect a mutant by chance."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    selections, justified = Selections.read(), Justified.read()
    every = find(PACKAGE, selections.files(PACKAGE))
    if options.show:
        return _show(every, options.show)
    chosen = [mutant for mutant in every if not options.only or any(matches(mutant.name, o) for o in options.only)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}  (line {mutant.line})  {mutant.change()}")
        print(f"{len(chosen)} mutants; {', '.join(f'{n} {kind}' for kind, n in _kinds(chosen).most_common())}")
        return 0
    names = [mutant.name for mutant in every]
    if stale := [*selections.stale(names, ROOT), *justified.stale(names)]:
        print("The tables name what does not exist. Remove it, or give the new name:", *stale, sep="\n  ")
        return 2
    trials = Trials(selections, Cache(options.cache), fresh=options.fresh, timeout=options.timeout)
    if not options.trust and not _all_sound(chosen, trials):
        return 2
    return _run_all(chosen, trials, justified, options.jobs)


class Trials:
    """Runs mutants, or returns cached results of a former run."""

    def __init__(self, selections: Selections, cache: Cache, *, fresh: bool, timeout: float) -> None:
        self._selections = selections
        self._cache = cache
        self._fresh = fresh
        self._timeout = timeout

    def result(self, mutant: Mutant) -> Result:
        return self._result(mutant, self._selections.of(mutant.name))

    def check(self, mutant: Mutant, tests: Sequence[str]) -> Result:
        """These tests on the unchanged source."""
        same = Mutant(mutant.file, f"{mutant.file}:unchanged", 0, mutant.original, mutant.original)
        return self._result(same, tests)

    def of(self, mutant: Mutant) -> Sequence[str]:
        """Its tests."""
        return self._selections.of(mutant.name)

    def _result(self, mutant: Mutant, tests: Sequence[str]) -> Result:
        key = key_of(mutant, ROOT, tests)
        found = None if self._fresh else self._cache.get(key)
        if found is None:
            found = self._judged(mutant, tests)
            self._cache.put(key, found)
        return found

    def _judged(self, mutant: Mutant, tests: Sequence[str]) -> Result:
        """Run the tests, without those that fail and then pass alone: they fail for another reason, or detect the
        mutant only sometimes. If no other test fails, the outcome is "chance".
        """
        passed: list[str] = []
        while True:
            without = [f"--deselect={test}" for test in passed]
            found = self._run(mutant, tests, without)
            # `make test` leaves out cases of tests with several parameters.
            if found.outcome == "survived" and mutant.source != mutant.original:
                found = self._run(mutant, tests, ["--all-cases", *without])
            if found.outcome == "survived" and passed:
                return replace(found, outcome="chance", test=passed[0])
            if found.outcome != "killed" or "::" not in found.test or "exit status" in found.test:
                return found
            if self._run(mutant, [found.test]).outcome != "survived":
                return found
            if len(passed) == _MOST_CHANCES:
                return replace(found, outcome="chance")
            passed.append(found.test)

    def _run(self, mutant: Mutant, tests: Sequence[str], without: Sequence[str] = ()) -> Result:
        """without: options that choose among the tests."""
        late = [test for test in tests if test.startswith(_LATE)]
        others = [test for test in tests if test not in late]
        result = Result("unused", "", 0.0)
        for chosen, options in ((others, []), (late, ["-m", "late"])):  # a process each: tests/late loads a device
            if chosen and result.outcome in ("survived", "unused"):
                options = [f"--timeout={_TEST_TIMEOUT}", *options, *without]
                before, result = result, self._run_once(mutant, chosen, options)
                if result.outcome == "unused" and before.outcome == "survived":
                    result = before
        return result

    def _run_once(self, mutant: Mutant, tests: Sequence[str], options: Sequence[str]) -> Result:
        return run(ROOT, _module(mutant.file), mutant.source, tests, timeout=self._timeout, options=options)


def _all_sound(chosen: Sequence[Mutant], trials: Trials) -> bool:
    """Return True if the tests of these mutants pass on the unchanged source; otherwise they would kill any mutant."""
    for (file, tests), mutant in {(mutant.file, tuple(trials.of(mutant))): mutant for mutant in chosen}.items():
        result = trials.check(mutant, tests)
        passes = result.outcome == "survived"
        print(f"{file} as it is: {'passes' if passes else result} in {result.seconds:.0f} s", *tests, flush=True)
        if not passes:
            return False
    return True


def _run_all(chosen: Sequence[Mutant], trials: Trials, justified: Justified, jobs: int) -> int:
    bad: list[str] = []
    counts: Counter[str] = Counter()
    executor = ThreadPoolExecutor(jobs)
    try:
        results = executor.map(_reported(trials, justified), chosen)
        for mutant, (outcome, line) in zip(chosen, results, strict=True):
            counts[outcome] += 1
            print(line, flush=True)
            if outcome in ("survived", "chance", "unused", "broken"):
                bad.append(mutant.name)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        end_all()
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if bad:
        print(
            "\nNo test notices that these are missing. Add one, delete the guard as dead, or say in justified.toml why"
        )
        print("no test can see it:", *bad, sep="\n  ")
    return 1 if bad else 0


def _reported(trials: Trials, justified: Justified) -> Callable[[Mutant], tuple[str, str]]:
    def report(mutant: Mutant) -> tuple[str, str]:
        result = trials.result(mutant)
        outcome: str = result.outcome
        said = result.test
        if outcome in ("survived", "chance") and (reason := justified.reason(mutant.name)):
            outcome, said = "justified", reason
        return outcome, f"{outcome:<9} {result.seconds:4.0f} s  {mutant.name}  {said}".rstrip()

    return report


def _show(every: Sequence[Mutant], name: str) -> int:
    found = [mutant for mutant in every if matches(mutant.name, name)]
    for mutant in found:
        print(mutant.diff(), "\n")
    return 0 if found else 1


def _module(file: str) -> str:
    return ".".join([PACKAGE.name, *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def _kinds(mutants: Sequence[Mutant]) -> Counter[str]:
    return Counter(mutant.name.split(":")[-1].split("#")[0] for mutant in mutants)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a file, file:function or a whole name; * fits")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--show", metavar="NAME", help="print what differs in a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (2)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of one mutant (600)")
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the unchanged source first")
    parser.add_argument("--fresh", action="store_true", help="run all again, whatever is known of them")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build/mutants/results.json", help="where results are kept"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
