"""Pages of bench/results: drawn from their JSON, with prose around, and nothing that the JSON does not hold."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness import RESULTS, write_json
from report import page

PATHS = page.results()
NAMES = [path.stem for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_page_holds_what_its_json_gives(path: Path) -> None:
    """Tables cannot drift from the measurements: bench/draw.py would change nothing."""
    assert page.drawn_page(path) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_new_page_has_title_fragments_and_plot(path: Path, tmp_path: Path) -> None:
    result = page.load(path)
    report = page.report_of(result)
    # Where a JSON is older than this head, a person wrote command and machine into the page.
    result = {"command": "a command", "machine": "a machine"} | result
    text = page.new_page(report, result, "trial")
    assert text.startswith(f"# {report.title(result)}\n")
    assert page.fill(text, report.fragments(result)) == text
    assert ("(trial.png)" in text) == (report.plot is not None) == path.with_suffix(".png").exists()


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_plots_are_drawn(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = page.load(path)
    plot = page.report_of(result).plot
    if plot is not None:
        plot(result, tmp_path / "trial.png")
        assert (tmp_path / "trial.png").stat().st_size > 10_000


def test_pages_hold_no_targets() -> None:
    """Published pages have facts and bounds; what a figure is expected to reach is in bench/limits.json."""
    for path in RESULTS.glob("*.md"):
        text = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))  # messages of libraries are code
        assert not re.search(r"aimed|allowed|asked for|at least|at most|target", text), path


def test_every_benchmark_has_a_report() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in RESULTS.parent.glob("*.py")}
    published = ("publish(", "training.compare(")
    scripts = {name for name, text in texts.items() if any(call in text for call in published)} - {"draw", "training"}
    assert {"step", "adam", "adam_cuda", "aio", "stripe", "checksums", "freed"} <= scripts
    for name in scripts:
        assert isinstance(importlib.import_module(f"report.{name}").REPORT, page.Report)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_only_fragments_are_replaced() -> None:
    text = f"# Title\n\n{page.enclosed('table', 'old')}\n\nProse.\n\n{page.enclosed('more', 'kept')}\n"
    filled = page.fill(text, {"table": "new \\1", "more": "kept", "unused": "x"})
    assert filled == text.replace("old", "new \\1")


def test_unknown_and_missing_fragments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fragments: tabel. Known are table."):
        page.fill(page.enclosed("tabel", ""), {"table": ""})
    with pytest.raises(ValueError, match=r"no fragments. Insert one of table"):
        page.fill("# Title\n", {"table": ""})


def test_publishing_keeps_the_prose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{"op": "read", "who": who, "gb_per_s": speed} for who, speed in SPEEDS.items()]
    path = tmp_path / "trial.json"
    write_json(path, {"bench": "stripe", "command": "a command", "machine": "a machine", "samples": samples})
    page.publish(path)
    assert "| read | 0.200 | 0.300 | 0.400 | 0.80 |" in capsys.readouterr().out
    written = path.with_suffix(".md")
    written.write_text(written.read_text() + "\nA conclusion.\n")
    samples[2]["gb_per_s"] = 0.5
    write_json(path, {**page.load(path), "samples": samples})
    page.publish(path)
    text = written.read_text()
    assert "| 0.500 | 1.00 |" in text and "| 0.400 |" not in text and text.endswith("\nA conclusion.\n")


def test_a_table_has_rows_of_one_length() -> None:
    assert page.table(["", "a"], [["x", "1"]]) == "|  | a |\n|---|---|\n| x | 1 |"
    with pytest.raises(AssertionError):
        page.table(["a"], [["x", "1"]])


def test_a_ratio_is_the_quotient_of_its_cells() -> None:
    """With the range of single rounds; a cell that is rounded to 0 has none."""
    assert page.ratio("3.89", "1.68", [1.9, 2.4, 2.0]) == "2.32 (1.90 to 2.40)"
    assert page.ratio("0.01", "0.000", [31.0, 47.0]) == "– (31.00 to 47.00)"


def test_a_setup_has_a_sentence_a_line() -> None:
    result = {"command": "c", "machine": "m", "note": "N.", "remark": "R."}
    assert page.setup(result, "S.") == "`c` on m.\nN.\nS.\nR."


# -- reports of which no result is kept --------------------------------------------------------------------------------

SPEEDS = {"one": 0.2, "the other": 0.3, "both": 0.4}
HEAD = {"command": "a command", "machine": "a machine"}


def drawn(result: dict[str, Any]) -> str:
    result = json.loads(json.dumps(HEAD | result))
    return page.new_page(page.report_of(result), result, "trial")


def test_the_cost_of_a_checkpoint_is_beside_none() -> None:
    run = {"stopped": 0.0, "whole": 0.0, "together": 4.0, "steps": [1.0, 3.0], "checkpoint_bytes": 2e9}
    run |= {"peak_rss": 2e9, "peak_rss_before": 1e9, "parameters": 10**8}
    saving = run | {"stopped": 0.5, "whole": 1.5, "together": 5.0}
    args = {"hidden": 1, "layers": 1, "vocab": 1, "sequence": 1, "batch": 1, "rounds": 1, "steps": 2}
    text = drawn({"bench": "save", "args": args, "runs": {"none, clip 0": [run], "background, clip 0": [saving]}})
    assert "| 2 steps and the checkpoint, s | 4.00 | 5.00 |" in text
    assert "| of that, the checkpoint's cost, s | 0.00 | 1.00 |" in text


def test_overhead_is_per_unit() -> None:
    now = {"initialize": 1.0, "close": 0.1, "step": 0.03, "cpu": 0.04, "units": 10}
    rows = [{"measurement": "memory", "tree": tree, "plain": "plain: units 10"} for tree in ("now", "abc")]
    samples = {
        "plain: units 10": [{"step": 0.01, "cpu": 0.02}],
        "now: memory": [now],
        "abc: memory": [now | {"step": 0.05}],
    }
    text = drawn({"bench": "overhead", "rows": rows, "samples": samples})
    assert "| memory | now | 10 | 1.00 | 0.10 | 30.0 | 10.0 | 3.00 | 2.000 | 2.000 |  |" in text
    assert "| 4.000 | 2.000 | 0.50 |" in text


def test_cuda_kernels_are_beside_a_copy() -> None:
    samples = [
        {"name": "copy", "bytes": 32, "seconds": [1.0, 2.0], "copy": [1.0, 2.0]},
        {"name": "adamw | fp32 | fp32 | fp32", "bytes": 28, "seconds": [1.0, 2.0], "copy": [1.0, 2.0]},
    ]
    text = drawn({"bench": "adam_cuda", "device": "a device", "n": 10**9, "samples": samples})
    assert "# The optimizer step on a device, 1e+09 parameters" in text
    assert "| adamw | fp32 | fp32 | fp32 | 28 | 0.7 | 19 | 0.88 |" in text
    assert "| copy |  |  |  | 32 | 0.7 | 21 | 1.00 |" in text
