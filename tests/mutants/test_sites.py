"""The rules find each kind of guard in a sample, and a mutant differs from its source in that one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants.rules import positions_of_after
from mutants.sites import find, mutants_of
from mutants.table import Justified, Selections, matches

SAMPLE = '''
class Store:
    def start(self, unit):
        unit.copied.wait()  # why
        self._tier.write(extent(unit), "é").wait()
        self._device.await_copy(unit.transfer)
        self.settle()
        job.after = unit.copied if unit.job is None else Both(unit.job.done, unit.copied)
        unit.generation += 1
        return self._gather(unit.flat(), unit.read, 3)

    def _gather(self, flat, after, unit):
        with self._lock:
            self.copy(flat, after=after)
        if unit._version != self.version:
            raise LifetimeError
        reached = self._device.compute_reached()
        self._device.compute_reached().wait()
        _follow(self._stream, after)
        waits = [after.wait]
        self._thread.join()
        return ", ".join(map(str, [reached]))

    def is_viewed(self, unit):
        """A guard."""
        return unit.holds and (unit.lent or unit.job.done())

    def drop(self, lease):
        if lease.is_referenced():
            self._kept[0] = lease.quarantine()

    def take(self, lease, unit, version=None):
        if unit.updated_early:
            raise UsageError
        if unit.slot in unit.collected:
            lease.substitute(self._kept.pop(0))
        if unit.shape != lease.shape:
            raise LifetimeError
        self.saved.notice()
        unit.fingerprint = None
        unit.assignments[0] += 1
        unit.collected.add(0)
        self.assigned = None if version is None else unit.assignments[0]
        for victim in self.victims():
            pass
'''

EXPECTED = {
    "Store.start:wait#1": "pass  # why",
    "Store.start:wait#2": 'self._tier.write(extent(unit), "é")',
    "Store.start:wait#3": "pass",
    "Store.start:settle#1": "pass",
    "Store.start:after#1": "pass",
    "Store.start:after#2": "job.after = unit.copied if unit.job is None else unit.job.done",
    "Store.start:after#3": "job.after = unit.copied if unit.job is None else unit.copied",
    "Store.start:generation#1": "pass",
    "Store.start:after#4": "return self._gather(unit.flat(), DONE, 3)",
    "Store._gather:lock#1": 'with __import__("contextlib").nullcontext():',
    "Store._gather:after#1": "self.copy(flat, after=DONE)",
    "Store._gather:version#1": "if False:",
    "Store._gather:event#1": "reached = DONE",
    "Store._gather:event#2": "DONE.wait()",
    "Store._gather:wait#1": "self._device.compute_reached()",
    "Store._gather:wait#2": "pass",
    "Store._gather:wait#3": "waits = [(lambda *arguments: None)]",
    "Store._gather:join#1": "pass",
    "Store.is_viewed:guard#1": "return True and (unit.lent or unit.job.done())",
    "Store.is_viewed:guard#2": "return unit.holds and (False or unit.job.done())",
    "Store.is_viewed:guard#3": "return unit.holds and (True)",
    "Store.is_viewed:guard#4": "return unit.holds and (unit.lent or False)",
    "Store.is_viewed:done#1": "return unit.holds and (unit.lent or True)",
    "Store.drop:guard#1": "if False:",
    "Store.drop:mark#1": "lease.quarantine()",
    "Store.drop:quarantine#1": "self._kept[0] = (lambda lease: (lease._held(), lease.release())[0])(lease)",
    "Store.take:mark#1": "if False:",
    "Store.take:mark#2": "if False:",
    "Store.take:substitute#1": "pass",
    "Store.take:refusal#1": "if False:",
    "Store.take:notice#1": "pass",
    "Store.take:fingerprint#1": "pass",
    "Store.take:assignment#1": "pass",
    "Store.take:mark#3": "pass",
    "Store.take:assigned#1": "pass",
    "Store.take:assignment#2": "self.assigned = None",
    "Store.take:assignment#3": "self.assigned = unit.assignments[0]",
    "Store.take:version#1": "self.assigned = None if True else unit.assignments[0]",
}


def mutants(source: str) -> dict[str, str]:
    """Return name → the changed line."""
    done = '__import__("infinity.tiers.transfer", fromlist=["DONE"]).DONE'
    found = mutants_of("store.py", source, positions_of_after([ast.parse(source)]))
    return {mutant.name.removeprefix("store.py:"): mutant.change().replace(done, "DONE") for mutant in found}


def test_every_kind_is_found_in_a_sample() -> None:
    assert mutants(SAMPLE) == EXPECTED


def test_a_mutant_differs_in_one_line_and_compiles() -> None:
    for mutant in mutants_of("store.py", SAMPLE, {"_gather": 1}):
        compile(mutant.source, mutant.name, "exec")
        lines = zip(SAMPLE.splitlines(), mutant.source.splitlines(), strict=True)
        differing = [number for number, (old, new) in enumerate(lines, 1) if old != new]
        assert differing == [mutant.line], mutant.name


def test_names_do_not_follow_line_numbers() -> None:
    longer = SAMPLE.replace("    def start", "    limit = 3\n\n    def other(self):\n        pass\n\n    def start")
    assert mutants(longer).keys() == mutants(SAMPLE).keys()


def test_the_package_has_mutants_that_compile() -> None:
    """Mutants of the whole package compile: a syntax error would count as killed."""
    package = Path(__file__).parents[2] / "infinity"
    found = find(package, Selections.read().files(package))
    assert len({mutant.name for mutant in found}) == len(found) > 50
    kinds = {mutant.name.split(":")[-1].split("#")[0] for mutant in found}
    assert {"wait", "after", "version", "generation", "guard", "lock", "event", "join"} <= kinds
    for mutant in found:
        compile(mutant.source, mutant.name, "exec")


def test_the_tables_name_what_exists() -> None:
    """Files, tests and mutants: a name that is gone would leave its guards out, or excuse others later."""
    root = Path(__file__).parents[2]
    package, selections = root / "infinity", Selections.read()
    names = [mutant.name for mutant in find(package, selections.files(package))]
    assert not selections.stale(names, root)
    assert not Justified.read().stale(names)


def test_names_that_are_gone_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_store.py").write_text("def test_one() -> None: ...")
    tests = ["test_store.py", "test_store.py::test_one[a]", "test_store.py::test_two", "test_gone.py"]
    entries = {"store.py:drop": tests, "store.py:hold": tests, "gone.py": []}
    found = Selections(entries).stale(["store.py:drop:wait#1"], tmp_path)
    assert found == [
        f"selections.toml: {name}" for name in ("store.py:hold", "gone.py", "test_store.py::test_two", "test_gone.py")
    ]


def test_the_longest_entry_counts() -> None:
    selections = Selections({"units/": ["a"], "units/unit.py": ["b"], "units/unit.py:Unit.hold": ["c"]})
    names = (
        "units/store.py:f:wait#1",
        "units/unit.py",
        "units/unit.py:Unit.bind:wait#1",
        "units/unit.py:Unit.hold:wait#1",
    )
    assert [selections.of(name) for name in names] == [["a"], ["b"], ["b"], ["c"]]
    assert not selections.of("engine.py")


@pytest.mark.parametrize("pattern", ["*", "a", "a/b.py:C", "a/b.py:C.f", "a/b.py:C.f:wait", "a/b.py:*:wait#1"])
def test_a_pattern_that_fits(pattern: str) -> None:
    assert matches("a/b.py:C.f:wait#1", pattern)
    assert not matches("a/b.py:C.f:wait#1", pattern + "x")


def test_reasons_are_found_and_old_ones_are_named() -> None:
    justified = Justified({"a.py:f:event": "CUDA only", "gone.py": "it was so"})
    assert justified.reason("a.py:f:event#2") == "CUDA only"
    assert not justified.reason("a.py:f:wait#1")
    assert justified.stale(["a.py:f:event#2", "a.py:f:wait#1"]) == ["justified.toml: gone.py"]


WAITS = ("wait", "after", "event", "done", "settle", "join")


def test_every_wait_of_the_package_has_tests() -> None:
    """A file that no entry of selections.toml names would be left out in silence. Libraries of integrations/ are not
    installed for them."""
    package, selections = Path(__file__).parents[2] / "infinity", Selections.read()
    every = sorted(str(path.relative_to(package)) for path in package.rglob("*.py"))
    every = [path for path in every if not path.startswith("integrations/")]
    forgotten = [
        mutant.name
        for mutant in find(package, every)
        if mutant.name.rpartition(":")[2].partition("#")[0] in WAITS and not selections.of(mutant.name)
    ]
    assert not forgotten
