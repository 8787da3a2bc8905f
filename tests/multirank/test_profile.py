"""engine.profile on two ranks: a file of each, with the lanes of collectives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from multirank import profile_cases
from support.ranks import Group


def test_every_rank_writes_its_own_transfers(pair: Group, tmp_path: Path) -> None:
    moved = pair.run(profile_cases.profiled, folder=str(tmp_path))
    for rank, name in enumerate(("trace.json", "trace.rank1.json")):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        work = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {rank}
        found = Counter[str]()
        for event in work:
            found[lanes[event["tid"]]] += event["args"]["bytes"]
        assert found["nvme_read"] == moved[rank]["nvme_read"] > 0
        assert found["nvme_write"] == moved[rank]["nvme_write"] > 0
        assert found["gather"] == moved[rank]["gather"] > 0
        collectives = [event for event in work if event["args"]["thread"] == "infinity-comm"]
        reduced = [event for event in collectives if lanes[event["tid"]] == "reduce" and event["name"] != "sum"]
        assert sum(event["args"]["bytes"] for event in reduced) == moved[rank]["reduce"] > 0
