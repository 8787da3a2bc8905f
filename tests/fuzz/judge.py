"""Runs a case by the plain loop and by the engine in two placements, and judges it."""

from __future__ import annotations

import gc
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuzz.case import Case, Setting, each_node
from fuzz.loops import Run
from fuzz.model import build
from fuzz.trainers import PlainTrainer, Trainer, opened
from infinity.errors import InfinityError, LifetimeError, NonFiniteError
from support.lifetime import assert_nothing_leaked

# Updates by torch and by the engine's kernel differ in the last bit: 6e-8 of a parameter in each of at most five steps,
# which losses of order one amplify little. A fault changes a value by a whole step, 1e-3 and more.
# In 16 bits a difference in the last bit may round a parameter to its neighbour.
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (3e-2, 2e-2), "fp16": (1e-2, 1e-2)}
"""dtype → relative tolerances of a loss and of a parameter."""


@dataclass
class Outcome:
    """Result of a training: all values that it read and its final state, or an error."""

    values: list[tuple[str, float]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None
    phase: str = ""
    quarantines: int = 0


@dataclass(frozen=True)
class Verdict:
    """Judgement of a case.

    kind: "same"; "same bits" (equal to the plain loop with the engine's kernels, so only rounding differed); "refused";
    "void" (plain PyTorch raises, or gives NaN). Failures: "different", "error", "leak", "placements differ"; "not
    finite" (the engine raises for NaN, but the plain loop has none); "unnoticed" (plain PyTorch refuses an in-place
    edit, the engine does not); "refused wrongly" (the engine refuses one, plain PyTorch does not, or updated a unit too
    early).
    """

    kind: str
    text: str = ""
    quarantines: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


FAILURES = (
    "different", "error", "leak", "placements differ", "hang", "crash", "not finite", "unnoticed", "refused wrongly",
)  # fmt: skip
EDITED = "modified by an inplace operation"
"""Part of the error text, PyTorch's and the engine's, for a tensor that was edited before backward needed it."""

LATE = "received a gradient after its update"
"""Part of the error text for a unit that was updated although backward had more gradients for it."""


def run_plain(case: Case, *, exact: bool = False) -> Outcome:
    """Train a case by the plain loop. exact: update with the engine's kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(case, PlainTrainer(build(case), case, exact=exact))


def run_engine(case: Case, setting: Setting) -> Outcome:
    """Train a case by an engine, and close it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _run_engine(case, setting)
    outcome.quarantines = sum("something still refers" in str(each.message) for each in caught)
    return outcome


def _run_engine(case: Case, setting: Setting) -> Outcome:
    outcome = Outcome(phase="initialize")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            with opened(case, setting, Path(folder)) as trainer:
                outcome = _run(case, trainer)
                if outcome.error is None:
                    outcome.phase = "leak"
                    assert_nothing_leaked(trainer.engine)
                    outcome.phase = "close"
        except Exception as error:  # noqa: BLE001 - judged
            outcome.error = outcome.error or error
    return outcome


def _run(case: Case, trainer: Trainer) -> Outcome:
    run = Run(case, trainer)
    outcome = Outcome(run.values, phase="train")
    try:
        run.train()
        outcome.phase = "state_dict"
        outcome.state = trainer.state()
    except Exception as error:  # noqa: BLE001 - judged
        outcome.error = error
    return outcome


def difference(one: Outcome, other: Outcome, dtype: str = "fp32", *, exact: bool = False) -> str | None:
    """Describe the first difference of two trainings without errors; None: there is none. NaN equals nothing."""
    loss, parameters = (0.0, 0.0) if exact else TOLERANCES[dtype]
    for (what, a), (name, b) in zip(one.values, other.values, strict=False):
        if what != name:
            return f"read {what!r}, expected {name!r}"
        if not abs(a - b) <= loss * max(abs(b), 0.1):
            return f"{what}: {a!r}, expected {b!r}"
    if len(one.values) != len(other.values):
        return f"read {len(one.values)} values, expected {len(other.values)}"
    return _states_differ(one.state, other.state, parameters)


def _states_differ(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], bound: float) -> str | None:
    if one.keys() != other.keys():
        return f"state_dict has other names: {sorted(one.keys() ^ other.keys())[:4]}"
    for name, value in other.items():
        a, b = one[name], value
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if bound == 0.0 or not (b.is_floating_point() or b.is_complex()):
            if not torch.equal(a, b):
                return f"{name} has other bits"
            continue
        apart = float((a - b).double().norm() if not b.is_complex() else (a - b).abs().norm())
        size = float(b.double().norm() if not b.is_complex() else b.abs().norm())
        if not apart <= bound * max(size, 0.1):
            return f"{name} differs by {apart / max(size, 0.1):.2e} of its norm"
    return None


def judge(case: Case) -> Verdict:
    """Compare the plain loop with the engine in both settings, and both settings with each other."""
    gc.collect()  # frees tensors of the former case: buffers count their references
    plain = run_plain(case)
    outcomes = [run_engine(case, setting) for setting in case.settings]
    quarantines = sum(outcome.quarantines for outcome in outcomes)
    verdicts = [_against_plain(case, outcome, plain) for outcome in outcomes]
    for setting, verdict in zip(case.settings, verdicts, strict=True):
        if verdict.failed:
            return Verdict(verdict.kind, f"{verdict.text}\n  in {setting}", quarantines)
    if all(outcome.error is None for outcome in outcomes) and plain.error is None:
        # Below stage 2, and where other units take the last buffers, of which debug plans fewer, gradients that arrive
        # several times in a step are summed in another order.
        alike = len({setting.stage < 2 for setting in case.settings}) == 1
        several = case.loop.backward in ("twice", "twice uncounted", "two losses") or case.loop.call == "two forwards"
        if case.loop.accumulation > 1 or several:
            alike = alike and len({(setting.unit_size, setting.debug) for setting in case.settings}) == 1
        bits = difference(outcomes[1], outcomes[0], case.loop.dtype, exact=alike)
        if bits and verdicts[0].kind != "void":
            return Verdict(
                "placements differ", f"{bits}\n  in {case.settings[1]}\n  and {case.settings[0]}", quarantines
            )
    order = ("refused", "void", "same bits", "same")
    worst = min(verdicts, key=lambda verdict: order.index(verdict.kind))
    return Verdict(worst.kind, worst.text, quarantines)


def _against_plain(case: Case, outcome: Outcome, plain: Outcome) -> Verdict:
    if outcome.error is not None:
        if isinstance(outcome.error, InfinityError):
            kind = "refused"
            if isinstance(outcome.error, NonFiniteError) and _is_finite(plain):
                kind = "not finite"
            if isinstance(outcome.error, LifetimeError) and EDITED in str(outcome.error):
                if plain.error is not None and EDITED in str(plain.error):
                    return Verdict("same", "both refuse the edit")
                if plain.error is None and not _has_own_hooks(case):
                    kind = "refused wrongly"
            if isinstance(outcome.error, LifetimeError) and LATE in str(outcome.error):
                kind = "refused wrongly"
            return Verdict(kind, f"{outcome.phase}: {summary(outcome.error)}")
        if plain.error is not None:
            return Verdict("void", f"plain: {summary(plain.error)}")
        kind = "leak" if outcome.phase == "leak" else "error"
        return Verdict(kind, f"{outcome.phase}: {type(outcome.error).__name__}: {_first_lines(outcome.error)}")
    if plain.error is not None:
        kind = "unnoticed" if EDITED in str(plain.error) else "void"
        return Verdict(kind, f"plain: {summary(plain.error)}; the engine did not")
    if any(value != value for _, value in plain.values):
        return Verdict("void", "plain: NaN")
    if case.loop.dtype == "fp16" and not _is_finite(plain):  # the engine leaves out such an update
        return Verdict("void", "plain: not finite")
    apart = difference(outcome, plain, case.loop.dtype)
    if apart is None:
        return Verdict("same")
    if difference(outcome, run_plain(case, exact=True), exact=True) is None:
        return Verdict("same bits", apart)
    return Verdict("different", apart)


def _has_own_hooks(case: Case) -> bool:
    """Return True if the model has saved-tensor hooks, which disable PyTorch's check for edits, not the engine's."""
    own = ("saved identity", "saved list", "save_on_cpu")
    return any(node.kind == "saved hooks" or node.variant in own for node in each_node(case.nodes))


def _is_finite(outcome: Outcome) -> bool:
    tensors = [value for value in outcome.state.values() if value.is_floating_point()]
    return (
        outcome.error is None
        and all(value == value for _, value in outcome.values)
        and all(bool(value.isfinite().all()) for value in tensors)
    )


def _first_lines(error: Exception) -> str:
    return "\n".join(str(error).splitlines()[:6])


def summary(error: Exception) -> str:
    """Return an error's text without parts that differ between cases, for counting."""
    text = str(error).split("\n")[0]
    text = re.sub(r"\b(inputs|head|parts)(\.\w+)+\b", "NAME", text)
    text = re.sub(r"unit NAME", "unit X", re.sub(r"unit \(root\)", "unit X", text))
    return f"{type(error).__name__}: {re.sub(r'[-+]?[0-9][0-9.e+-]*', '#', text)[:150]}"
