"""Collectives of host memory: gloo's beside `infinity.comm.pairs`."""

from __future__ import annotations

from harness import Result, grouped, median
from report.page import Report, setup, table

LEGEND = """\
All ranks run on one machine, over the loopback device.
Cells are milliseconds of wall time / of rank 0's CPU, medians.
pairs: `infinity.comm.pairs`, which training on gloo takes.
Sizes are those of the whole tensor; an agreement, which comes before every collective, is a few integers from each \
rank, whatever the size."""


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


def fragments(result: Result) -> dict[str, str]:
    return {"setup": setup(result), "tables": tables(result)}


REPORT = Report(lambda result: "Collectives of host memory over gloo", fragments)
