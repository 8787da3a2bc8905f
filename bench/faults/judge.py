"""Runs one case and returns its verdict: the numbers of the undisturbed training, an error that names the cause, or a
failure.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults import armed
from faults.armed import Counts
from faults.cases import KILLS, Case, Fault, Setting
from faults.trained import SAVED, train
from infinity.comm.liveness.processes import EXIT_STATUS

SECONDS = 120.0
"""Time limit of one attempt; a longer one counts as hanging."""
PRELOADED = [
    "torch.distributed",
    "torch._dynamo",
    "infinity.engine.initialize",
    "infinity.engine.training",
    "infinity.config",
]
LOST = (
    r"rank \d+ \(host .+\) (is lost|has not responded|failed|closed)|a collective failed|"
    r"the ranks could not connect|another rank could not commit it"
)
CAUSES = {
    "no space": r"No space left on device|failed: .*space",
    "small file system": r"too little space|No space left on device",
    "I/O error": r"Input/output error",
    "cut file": r"ended|end of|short|checksum|cut|zero|shorter",
    "cut file at rest": r"short|cut|damaged|has \d",
    "bit flip at rest": r"checksum|damaged|differ from those",
    "failed sync": r"Input/output error",
    "memory limit": (
        r"MemoryError|too little memory|[Cc]annot allocate memory|can't allocate memory|bad_alloc|"
        r"can't start new thread|Resource temporarily unavailable"
    ),
}
"""Kind of fault → pattern of the expected error. The other kinds raise no error on the rank itself."""
_ABORTED = 127
_NO_THREAD_LOCAL = "cannot allocate memory for thread-local data: ABORT"
"""Error by which glibc ends a process without memory for a library's thread-local variables."""
LEFT = re.compile(r"run(/\d{4}(/rank-\d{5}\.(json|states|record-[01]))?|/rank-\d{5}\.lock)?")
"""Names that a durable run leaves in its folder."""
PART = re.compile(r"run/\d{4}/rank-\d{5}\.part")
"""Names that a kill may leave. The next start removes them."""


@dataclass(frozen=True)
class Reference:
    """An undisturbed training. losses: by rank, step → loss. counts: by rank."""

    losses: list[dict[int, str]]
    digests: list[str]
    counts: list[Counts]


@dataclass
class Verdict:
    """outcome: "same numbers", "refused" (an error that names the cause), or the kind of failure.

    kills: processes ended by SIGKILL. recovery: seconds until the states of the last commit were back.
    """

    seed: int
    kind: str
    ranks: int
    durable: bool
    outcome: str = "same numbers"
    text: str = ""
    seconds: float = 0.0
    kills: int = 0
    resumed: int = 0
    recovery: list[float] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.outcome not in ("same numbers", "refused")


class Wrong(Exception):
    """outcome, text: those of the verdict."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(f"{outcome}: {text}")
        self.outcome, self.text = outcome, text


@dataclass
class Attempt:
    """Exit statuses of one attempt by rank, and the results of its processes; None if one ended without a result."""

    said: list[dict[str, Any] | None]
    statuses: list[int]


class Judge:
    """Runs cases with their files in the folder `room`. Thread-safe."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._references: dict[Setting, Reference] = {}
        self._lock = threading.Lock()

    def judge(self, case: Case) -> Verdict:
        verdict = Verdict(case.seed, case.fault.kind, case.setting.ranks, case.setting.durable)
        work = tempfile.mkdtemp(prefix="campaign-", dir=self._room)
        begun = time.monotonic()
        try:
            undisturbed = self.reference(case.setting)
            Trial(self, case, undisturbed, work, verdict).run()
        except Wrong as wrong:
            verdict.outcome, verdict.text = wrong.outcome, wrong.text
        finally:
            shutil.rmtree(work, ignore_errors=True)
        verdict.seconds = time.monotonic() - begun
        return verdict

    def reference(self, setting: Setting) -> Reference:
        """Train once with `setting`. Raises Wrong if losses or parameters differ from those with states in memory."""
        with self._lock:
            known = self._references.get(setting)
        if known is None:
            known = self._undisturbed(setting)
            if setting != setting.numbers:
                check_same(known.losses, known.digests, self.reference(setting.numbers), whole=True)
            with self._lock:
                self._references[setting] = known
        return known

    def _undisturbed(self, setting: Setting) -> Reference:
        work = tempfile.mkdtemp(prefix="campaign-", dir=self._room)
        try:
            os.mkdir(f"{work}/files")
            attempt = self.attempt(setting, None, [{}] * setting.ranks, work, 0)
            said = [each or {"error": "it ended without a result"} for each in attempt.said]
            for rank, each in enumerate(said):
                if "error" in each:
                    raise Wrong("undisturbed training failed", f"{setting}: rank {rank}: {each['error']}")
            counts = [{**each["counts"], "seconds": each["ended"] - each["met"]} for each in said]
            losses = [losses_of(work, rank) for rank in range(setting.ranks)]
            return Reference(losses, [each["digest"] for each in said], counts)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def attempt(
        self,
        setting: Setting,
        fault: Fault | None,
        counts: list[Counts],
        work: str,
        number: int,
        watch: Callable[[list[Any]], None] = lambda processes: None,
        *,
        loads: bool = False,
    ) -> Attempt:
        """Train once. watch: called repeatedly while the processes run. loads: from the saved checkpoint."""
        processes = [
            self._context.Process(target=train, args=(setting, fault, counts[rank], rank, work, number, loads))
            for rank in range(setting.ranks)
        ]
        begun = time.monotonic()
        try:
            for process in processes:
                with self._lock:
                    process.start()
            while self._is_any_alive(processes):
                time.sleep(0.005)
                watch(processes)
                if time.monotonic() - begun > SECONDS:
                    raise Wrong("hangs", f"attempt {number} takes more than {SECONDS:.0f} s: {outputs(work)}")
        finally:
            for process in processes:
                if process.pid is not None:
                    with self._lock:
                        process.kill()
                        process.join()
        said = [read(Path(f"{work}/said-{number}-{rank}.json")) for rank in range(setting.ranks)]
        statuses = [int(process.exitcode or 0) for process in processes]
        for process in processes:
            process.close()
        return Attempt(said, statuses)

    def _is_any_alive(self, processes: list[Any]) -> bool:
        """Locked: to start a process is to ask for the exit status of all others, which can be read once."""
        with self._lock:
            return any(process.is_alive() for process in processes)


class Trial:
    """One case, from its fault to the resumed training."""

    def __init__(self, judge: Judge, case: Case, reference: Reference, work: str, verdict: Verdict) -> None:
        self._judge = judge
        self._setting, self._fault = case.setting, case.fault
        self._reference = reference
        self._work = work
        self._files = f"{work}/files"
        self._verdict = verdict

    def run(self) -> None:
        """Raises Wrong."""
        os.mkdir(self._files)
        undo = self._small_file_system() if self._fault.kind == "small file system" else lambda: None
        try:
            faults = self._faults()
            ended = False
            for number, fault in enumerate([*faults, None]):
                attempt = self._attempt(fault, number)
                self._check_numbers()
                ended = all(said is not None and "digest" in said for said in attempt.said)
                if ended:
                    self._check_end(attempt)
                    break
                self._check_error(attempt, number if fault is not None else -1)
                self._check_left(killed=-signal.SIGKILL in attempt.statuses)
                if not self._setting.durable or (self._verdict.outcome == "refused" and fault is None):
                    break
                if number == 0:
                    self._damage()
            self._check_left()
            self._check_saved(must_be_there=ended and attempt.said[0] is not None and attempt.said[0]["first"] < 3)
        finally:
            undo()

    def _faults(self) -> list[Fault]:
        """Return the faults of all attempts except the last one."""
        fault = self._fault
        if fault.kind.endswith("at rest"):
            fault = Fault("kill at a request", fault.rank, fault.at, fault.value, -1.0, fault.closes)
        again = Fault("kill at a request", fault.rank, fault.again, fault.value, -1.0, fault.closes)
        return [fault, again] if fault.again >= 0 else [fault]

    def _attempt(self, fault: Fault | None, number: int) -> Attempt:
        held: dict[int, float] = {}
        met: list[float] = []

        def watch(processes: list[Any]) -> None:
            now = time.monotonic()
            if fault is None:
                return
            process = processes[fault.rank]
            if not met and len(list(Path(self._work).glob(f"meeting-{number}-*"))) == len(processes):
                met.append(now)  # earlier, ranks wait in torch's own code
            late = met and now > met[0] + fault.at * self._reference.counts[0]["seconds"]
            if fault.kind == "kill at a time" and late:
                signal_to(process.pid, signal.SIGKILL)
            is_held = fault.kind == "stopped for a moment" and is_stopped(process.pid)
            if is_held and now > held.setdefault(process.pid, now) + 0.1 + 0.3 * fault.value:
                signal_to(process.pid, signal.SIGCONT)
            said = Path(self._work).glob(f"said-{number}-*.json")
            if fault.kind == "hang" and len(list(said)) == len(processes) - 1 and is_stopped(process.pid):
                signal_to(process.pid, signal.SIGKILL)

        began = time.time()
        attempt = self._judge.attempt(self._setting, fault, self._reference.counts, self._work, number, watch)
        self._verdict.kills += attempt.statuses.count(-signal.SIGKILL)
        if number > 0:
            resumed = [said["resumed"] - began for said in attempt.said if said is not None and "resumed" in said]
            self._verdict.recovery += resumed[:1]
            self._verdict.resumed += bool(resumed and any(said and said.get("first") for said in attempt.said))
        return attempt

    def _check_numbers(self) -> None:
        """Check that the losses of all attempts so far equal those of the undisturbed training."""
        losses = [losses_of(self._work, rank) for rank in range(self._setting.ranks)]
        check_same(losses, None, self._reference, whole=False)

    def _check_end(self, attempt: Attempt) -> None:
        losses = [losses_of(self._work, rank) for rank in range(self._setting.ranks)]
        check_same(losses, [said["digest"] for said in attempt.said if said], self._reference, whole=True)
        self._verdict.outcome = "same numbers"

    def _check_error(self, attempt: Attempt, number: int) -> None:
        """Check that processes that ended early were killed, or raised one error that names the cause."""
        cause = CAUSES.get(self._fault.kind, "")
        killed = [status == -signal.SIGKILL for status in attempt.statuses]
        for rank, (said, status) in enumerate(zip(attempt.said, attempt.statuses, strict=True)):
            if said is None:
                output = outputs(self._work, rank)
                is_lost = status == EXIT_STATUS and re.search(LOST, output, re.S)
                if is_lost or (status == _ABORTED and _NO_THREAD_LOCAL in output):
                    self._verdict.outcome = "refused"
                    continue
                is_meant = self._fault.kind in (*KILLS, "hang") or self._fault.kind.endswith("at rest")
                if not (killed[rank] and is_meant and rank == self._fault.rank and number >= 0):
                    raise Wrong("crash", f"rank {rank} ended with status {status}: {outputs(self._work, rank)}")
                continue
            error = str(said.get("error", ""))
            if "digest" in said:
                continue
            self._verdict.text = error
            may_be_lost = self._setting.ranks > 1 and re.search(LOST, error)
            if not ((cause and re.search(cause, error, re.S)) or may_be_lost):
                raise Wrong("unclear error", f"rank {rank}: {error}")
            if not re.match(r"[A-Z]\w+(Error|Exception): |OSError: ", error):
                raise Wrong("unclear error", f"rank {rank}: {error}")
            self._verdict.outcome = "refused"

    def _check_left(self, *, killed: bool = False) -> None:
        for path in sorted(Path(self._files).rglob("*")):
            name = str(path.relative_to(self._files))
            is_part = killed and PART.fullmatch(name)
            if not (self._setting.durable and (is_part or LEFT.fullmatch(name))):
                raise Wrong("left over", name)

    def _check_saved(self, *, must_be_there: bool) -> None:
        """A checkpoint that is there goes on with the numbers of the undisturbed training, and a part of one has no
        name that is loaded.
        """
        folder = Path(self._work, "saved")
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        # A process that ends in a save leaves a hidden folder, which the next save removes.
        may_be_hidden = self._verdict.kills > 0 or not self._fault.closes
        left = {name for name in names if not (may_be_hidden and name.startswith("."))} - {SAVED, "latest"}
        if left:
            raise Wrong("left over", f"saved: {', '.join(sorted(left))}")
        if must_be_there and self._setting.saves and not {SAVED, "latest"} <= names:
            raise Wrong("wrong numbers", "the checkpoint is missing")
        if "latest" in names:
            setting = replace(self._setting, durable=False, saves="")
            attempt = self._judge.attempt(setting, None, self._reference.counts, self._work, 9, loads=True)
            for said in attempt.said:
                if said is None or "digest" not in said:
                    raise Wrong("unclear error", f"the checkpoint cannot be loaded: {said and said.get('error')}")
            self._check_numbers()
            first = attempt.said[0]  # a checkpoint has the buffers of the first rank, for all
            if first is not None and first["digest"] != self._reference.digests[0]:
                raise Wrong("wrong numbers", "parameters differ at the end of the training from the checkpoint")

    def _damage(self) -> None:
        paths = [str(path) for path in Path(self._files).rglob("*.states*")]
        if self._fault.kind == "cut file at rest":
            armed.cut(paths, self._fault.value)
        elif self._fault.kind == "bit flip at rest":
            armed.flip(paths, self._fault.at, self._fault.value)

    def _small_file_system(self) -> Callable[[], None]:
        """Mount a tmpfs smaller or somewhat larger than the training needs. Without permission to mount: no-op."""
        size = 4096 * int(10 + 300 * self._fault.value)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "campaign", self._files]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return lambda: None
        return lambda: subprocess.run(["umount", "-l", self._files], check=True).check_returncode()


def outputs(work: str, rank: int | str = "*") -> str:
    """Return what processes printed, at most 3,000 characters of each."""
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(Path(work).glob(f"output-*-{rank}")))


def losses_of(work: str, rank: int) -> dict[int, str]:
    """Return step → loss. Raises Wrong if a step was trained twice with different losses."""
    path = Path(f"{work}/losses-{rank}")
    found: dict[int, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        step, loss = line.split()
        if found.setdefault(int(step), loss) != loss:
            raise Wrong("wrong numbers", f"rank {rank}: step {step} has another loss when it is trained again")
    return found


def check_same(losses: list[dict[int, str]], digests: list[str] | None, expected: Reference, *, whole: bool) -> None:
    """Raise Wrong if losses or parameters differ. whole: also if steps are missing."""
    for rank, (mine, other) in enumerate(zip(losses, expected.losses, strict=True)):
        for step, loss in mine.items():
            if other[step] != loss:
                raise Wrong("wrong numbers", f"rank {rank}: step {step} has the loss {loss}, not {other[step]}")
        if whole and mine.keys() != other.keys():
            raise Wrong("wrong numbers", f"rank {rank}: steps {sorted(mine)} were trained, not {sorted(other)}")
    if digests is not None and digests != expected.digests:
        raise Wrong("wrong numbers", "parameters differ at the end")


def read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def signal_to(process: int, number: int) -> None:
    """Send a signal to a process that may have ended. The forkserver keeps its number until its status is read."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
