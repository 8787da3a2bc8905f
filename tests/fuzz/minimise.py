"""Finds the smallest case with the same failure, by removing one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from fuzz.case import Case, Loop, Node, Setting
from fuzz.judge import Verdict, judge


def minimise(case: Case) -> tuple[Case, Verdict]:
    """Replace the case by the first simpler one with the same kind of verdict until there is none (greedy)."""
    verdict = judge(case)
    if not verdict.failed:
        return case, verdict
    smaller = True
    while smaller:
        smaller = False
        for simpler in simpler_cases(case):
            found = judge(simpler)
            if found.kind == verdict.kind:
                case, verdict, smaller = simpler, found, True
                break
    return case, verdict


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield every case with one thing removed, the largest things first."""
    for nodes in _fewer(case.nodes):
        if nodes:
            yield replace(case, nodes=nodes)
    for number in range(len(case.loop.events)):
        events = case.loop.events[:number] + case.loop.events[number + 1 :]
        yield replace(case, loop=replace(case.loop, events=events))
    for loop in _defaults(case.loop, Loop()):
        yield replace(case, loop=loop)
    for number, setting in enumerate(case.settings):
        for changed in _defaults(setting, Setting()):
            settings = [*case.settings]
            settings[number] = changed
            yield replace(case, settings=(settings[0], settings[1]))
    if case.head != "plain":
        yield replace(case, head="plain")


def _fewer(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    for number, node in enumerate(nodes):
        before, after = nodes[:number], nodes[number + 1 :]
        yield before + after
        if node.children:
            yield before + node.children + after
            for children in _fewer(node.children):
                if children:
                    yield (*before, replace(node, children=children), *after)
        if node.frozen:
            yield (*before, replace(node, frozen=False), *after)


def _defaults(value: Loop | Setting, simplest: Loop | Setting) -> Iterator[Loop | Setting]:
    for each in fields(value):
        default = getattr(simplest, each.name)
        if each.name != "events" and getattr(value, each.name) != default:
            yield replace(value, **{each.name: default})
