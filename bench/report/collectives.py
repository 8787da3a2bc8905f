"""Collectives of host memory: gloo's beside `infinity.comm.pairs`."""

from __future__ import annotations

from harness import Result, grouped, median
from report.page import Report, setup, table

LEGEND = """\
All ranks run on one machine, over the loopback device.
Cells: median milliseconds of wall time / of rank 0's CPU time.
pairs: `infinity.comm.pairs`, which training over gloo uses.
Sizes are those of the whole tensor."""

AGREEMENT = """\
Before a collective, ranks agree that all issue the same one (`infinity/comm/agreement/announcer.py`).
A collective that earlier ones predict costs no message; an unseen one costs an exchange between all ranks.
Cells: median microseconds of wall time / of rank 0's CPU time for a collective; messages that a rank sends.
All ranks run on one machine, so with more ranks than cores wall time includes the other ranks' work."""


def tables(result: Result) -> str:
    by_size = grouped(result["samples"], "ranks", "mib", "what", "how")
    parts = [LEGEND]
    for ranks in dict.fromkeys(key[0] for key in by_size):
        columns = list(dict.fromkeys(key[2:] for key in by_size if key[0] == ranks))
        rows = []
        for mib in dict.fromkeys(key[1] for key in by_size if key[0] == ranks):
            found = [by_size[ranks, mib, what, how] for what, how in columns]
            rows.append(
                [f"{mib:g}", *(f"{1e3 * median(s, 'seconds'):.2f} / {1e3 * median(s, 'cpu'):.2f}" for s in found)]
            )
        parts += [f"## {ranks} ranks", table(["MiB", *(f"{what}, {how}" for what, how in columns)], rows)]
    return "\n\n".join(parts)


def agreement(result: Result) -> str:
    samples = result.get("agreement", {}).get("samples", [])
    found = grouped(samples, "ranks", "how")
    columns = list(dict.fromkeys(how for _, how in found))
    cells = {
        key: f"{1e6 * median(s, 'seconds'):.1f} / {1e6 * median(s, 'cpu'):.1f}; {median(s, 'messages'):g}"
        for key, s in found.items()
    }
    rows = [[str(ranks), *(cells[ranks, how] for how in columns)] for ranks in dict.fromkeys(key[0] for key in found)]
    return "\n\n".join([setup(result["agreement"]), AGREEMENT, table(["ranks", *columns], rows)]) if rows else ""


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result), "tables": tables(result), "agreement": agreement(result)}


def figures(result: Result) -> dict[str, float]:
    found = grouped(result.get("agreement", {}).get("samples", []), "ranks", "how")
    return {f"agreement: {ranks} ranks, {how}, µs": 1e6 * median(s, "seconds") for (ranks, how), s in found.items()}


REPORT = Report(lambda result: "Collectives of host memory over gloo", fragments, figures)
