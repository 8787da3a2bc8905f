"""Rules over the syntax tree that select what to remove. They name no functions or files.

| kind | removed |
|---|---|
| wait, settle, join | a statement that waits, or a wait that is passed on: for a transfer, all updates, a thread |
| after | what a transfer, a collective or an update waits for before it starts |
| draft | a statement that begins, ends or takes back an update before the norm is known |
| done | a question whether a transfer has ended: the answer is yes |
| event | the point that compute has reached: it counts as reached |
| version, generation, fingerprint, assigned | a comparison that notices an edit or an update, or what it compares |
| hold | the count of forwards that need a unit |
| token | the reference that counts a saved tensor |
| mark | a flag or an entry that records an event of a unit in this step, and each question for it |
| notice | a call that reports that a backward goes on |
| quarantine | a buffer that is still referred to is reused |
| substitute | a fetched unit takes the pool's buffer and not the one that is viewed |
| refusal | a condition before LifetimeError |
| guard | an operand of a condition in a function that says whether a unit may be updated or evicted |
| lock | a critical section |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_DONE = '__import__("infinity.tiers.transfer", fromlist=["DONE"]).DONE'
_NO_LOCK = '__import__("contextlib").nullcontext()'
_WAITS = {
    "wait": "wait",
    "await_copy": "wait",
    "await_update": "wait",
    "await_updates": "wait",
    "_finish_update": "wait",
    "synchronize": "wait",
    "wait_event": "wait",
    "wait_stream": "wait",
    "follow_compute": "wait",
    "result": "wait",
    "exception": "wait",
    "settle": "settle",
    "withdraw": "draft",
    "_take_back_drafts": "draft",
    "begin_draft": "draft",
    "end_draft": "draft",
    "barrier": "wait",
    "join": "join",
}
_PASSED_ON = {"wait", "await_copy"}
_FUNCTIONS = {"_follow"}
"""Functions of a module that wait."""
_WITHOUT_ARGUMENTS = {"result", "exception", "join"}  # as `", ".join(names)` and `logger.exception(text)` have some
_COUNTERS = re.compile(r"(?:^|_)(version|generation|fingerprint|assigned|assignment|pin_count|token)s?$")
_MARKS = re.compile(r"^(updated_early|collected|_overwritten|_kept|kept|drafted|_drafts)$")
"""Attributes that record events of units."""
_CHANGES = {"add", "discard", "remove", "pop", "clear", "update"}
_NOTICES = {"notice"}
_RECORDS = {"note_fingerprint": "fingerprint", "overwritten": "generation", "pin": "pin_count", "unpin": "pin_count"}
"""Calls that change such an attribute of a unit."""
_LOCKS = re.compile(r"(?:^|_)(lock|mutex|changed|turn|access|condition)$")
_LIFETIME = re.compile(
    r"(?:^|_)(viewed|viewers|lent|referenced|references|edited|busy|finished|live|lingers|pinned|victims"
    r"|evictable|placeholders|past)(?:_|$)"
)
"""Words in the names of functions that decide whether a unit or its buffer is still needed."""
_NOT_OURS = {"torch", "dist", "os", "nn", "F"}

Position = tuple[int, int]


@dataclass(frozen=True)
class Edit:
    """Replacement of the text from `start` to `end`, each (line, column in bytes), in a function."""

    function: str
    kind: str
    start: Position
    end: Position
    replacement: str
    kept: ast.expr | None = None
    """The node whose text replaces "{}" in `replacement`."""


def positions_of_after(trees: Iterable[ast.Module]) -> dict[str, int]:
    """Return method → position of its parameter `after` among the arguments of a call."""
    found: dict[str, int] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                if "after" in names and names[0] == "self":
                    found[node.name] = names.index("after") - 1
    return found


def edits(tree: ast.Module, after: Mapping[str, int]) -> Iterator[Edit]:
    """Return all edits of a module, in no order. Some may give the same text."""
    finder = _Finder(after)
    finder.visit(tree)
    return iter(finder.found)


class _Finder(ast.NodeVisitor):
    def __init__(self, after: Mapping[str, int]) -> None:
        self.found: list[Edit] = []
        self._after = after
        self._names: list[str] = []
        self._guards = 0
        """Number of enclosing functions that decide on a unit's lifetime."""
        self._statements: set[int] = set()
        """Calls whose result nobody takes."""
        self._called: set[int] = set()
        """Functions of calls; others are passed on, to be called later."""
        self._lists: set[int] = set()
        """Calls whose results are iterated over: no answers."""

    def _add(self, kind: str, node: ast.expr | ast.stmt, replacement: str, kept: ast.expr | None = None) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        self.found.append(Edit(".".join(self._names) or "<module>", kind, start, end, replacement, kept))

    # -- where we are ------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        guard = bool(_LIFETIME.search(node.name))
        self._names.append(node.name)
        self._guards += guard
        self.generic_visit(node)
        self._guards -= guard
        self._names.pop()

    # -- statements --------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        self._statements.add(id(call))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            name, receiver = call.func.attr, call.func.value
            if name in _WAITS and (name not in _WITHOUT_ARGUMENTS or not (call.args or call.keywords)):
                # `tier.write(...).wait()` keeps its write.
                worker = receiver if _has_call(receiver) else next(filter(_has_call, call.args), None)
                self._add(_WAITS[name], node, "pass" if worker is None else "{}", worker)
            elif name == "shutdown" and not call.keywords and not call.args:
                self._add("join", node, "{}(wait=False)", call.func)
            elif name == "substitute":
                self._add("substitute", node, "pass")
            elif name in _RECORDS:
                self._add(_RECORDS[name], node, "pass")
            elif name in _NOTICES:
                self._add("notice", node, "pass")
            elif name in _CHANGES and _MARKS.search(_name(receiver)):
                self._add("mark", node, "pass")
        elif isinstance(call, ast.Call) and _name(call.func) in _FUNCTIONS:
            self._add("wait", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        place = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        if match := _COUNTERS.search(_name(place)):
            self._add(match[1], node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            kind = _kind_of_state(target)
            if kind and self._names[-1:] != ["__init__"]:
                # The value of `self._kept[index] = KeptBuffer(lease.quarantine())` is still computed.
                kept = node.value if isinstance(target, ast.Subscript) and _has_call(node.value) else None
                self._add(kind, node, "pass" if kept is None else "{}", kept)
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if _LOCKS.search(_name(item.context_expr)):
                self._add("lock", item.context_expr, _NO_LOCK)
        self.generic_visit(node)

    # -- expressions -------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        self._called.add(id(node.func))
        for keyword in node.keywords:
            if keyword.arg == "after" and not _is_done(keyword.value):
                self._add("after", keyword.value, _DONE)
        if isinstance(node.func, ast.Attribute) and _name(node.func.value) not in _NOT_OURS:
            place = self._after.get(name)
            if place is not None and place < len(node.args) and not _is_done(node.args[place]):
                self._add("after", node.args[place], _DONE)
            if name == "done" and not node.args:
                self._add("done", node, "True")
            if name == "compute_reached":
                self._add("event", node, _DONE)
            if name == "record" and _name(node.func.value) == "event":
                self._add("event", node, "None")
            if name == "quarantine":
                reused = "(lambda lease: (lease._held(), lease.release())[0])({})"
                self._add("quarantine", node, reused, node.func.value)
        if name == "Both" and len(node.args) == 2:
            for operand in node.args:
                self._add("after", node, "{}", operand)
        asked = id(node) not in self._statements and id(node) not in self._lists
        if asked and _LIFETIME.search(name) and name not in self._names:
            self._add("guard", node, "False")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _PASSED_ON and id(node) not in self._called:
            self._add("wait", node, "(lambda *arguments: None)")
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        body = node.body
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Attribute) and body.func.attr == "wait":
            self._add("wait", body, "None")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        parts = [node.left, *node.comparators]
        matches = [match for part in parts for inner in ast.walk(part) if (match := _COUNTERS.search(_name(inner)))]
        if matches and len(node.ops) == 1:
            if isinstance(node.ops[0], ast.Eq | ast.NotEq):
                self._add(matches[0][1], node, str(isinstance(node.ops[0], ast.Eq)))
            elif isinstance(node.ops[0], ast.Is | ast.IsNot):  # as if it never were, or always
                self._add(matches[0][1], node, "True")
        if any(_MARKS.search(_name(part)) for part in node.comparators):
            self._add("mark", node, "False")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        branches = (node.body, node.orelse)
        places = [branch.value if isinstance(branch, ast.Subscript) else branch for branch in branches]
        kind = next((match[1] for place in places if (match := _COUNTERS.search(_name(place)))), None)
        if kind is not None:
            for branch in branches:
                self._add(kind, node, "{}", branch)
        if _MARKS.search(_name(node.test)):
            self._add("mark", node.test, "False")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._lists.add(id(node.iter))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if self._guards:
            neutral = str(isinstance(node.op, ast.And))
            for operand in node.values:
                self._add("guard", operand, neutral)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if _MARKS.search(_name(node.test)):
            self._add("mark", node.test, "False")
        elif self._guards and not isinstance(node.test, ast.BoolOp):
            self._add("guard", node.test, "False")
        elif _refuses(node):
            self._add("refusal", node.test, "False")
        elif isinstance(node.test, ast.Name) and _LIFETIME.search(node.test.id):
            self._add("guard", node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._lists.add(id(node.iter))
        if self._guards:
            for condition in node.ifs:
                if not isinstance(condition, ast.BoolOp):
                    self._add("guard", condition, "True")
        self.generic_visit(node)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _kind_of_state(target: ast.expr) -> str:
    """The kind of a statement that assigns to `target`; empty if it is to stay."""
    place = target.value if isinstance(target, ast.Subscript) else target
    if not isinstance(place, ast.Attribute):
        return ""
    if place.attr == "after":
        return "after"
    if match := _COUNTERS.search(place.attr):
        return match[1]
    return "mark" if _MARKS.search(place.attr) else ""


def _refuses(node: ast.If) -> bool:
    """Return True if the branch only raises LifetimeError, and its condition compares no counts (another rule)."""
    first = node.body[0]
    raised = first.exc if isinstance(first, ast.Raise) else None
    error = raised.func if isinstance(raised, ast.Call) else raised
    compares = any(_COUNTERS.search(_name(inner)) for inner in ast.walk(node.test))
    return error is not None and _name(error) == "LifetimeError" and not compares


def _has_call(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _is_done(node: ast.expr) -> bool:
    return _name(node) == "DONE" or (isinstance(node, ast.Constant) and node.value is None)
