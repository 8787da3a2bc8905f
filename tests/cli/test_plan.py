"""`infinity plan`: its JSON and table, models that do not fit, the largest model, refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cli.links.bench import ProcessMemory
from infinity.errors import OutOfMemoryError
from infinity.observe.timeline import LANES
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sizes import show_bytes
from support.advice import followed, merged
from support.commands import refused, run

SHAPE = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--vocab-size", "256", "--seq-length", "32", "--batch-size", "2"),
)
RATES = {
    "nvme_read": 2e9,
    "nvme_write": 3e9,
    "nvme_mixed": 2e9,
    "memory": 10e9,
    "host_to_device": 12e9,
    "device_to_host": 12e9,
    "collective": 5e9,
    "flops": {"float32": 1e11, "bfloat16": 2e11, "float16": None},
    "baseline_rss": 200_000_000,
}
MEMORY = ("--host-memory", "8GiB", "--nvme", "8GiB")


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(RATES))
    return file


def planned(*options: Any, code: int = 0) -> dict[str, Any]:
    result = run("plan", *options, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_json_has_bytes_of_each_kind_and_seconds_of_each_lane(rates: Path) -> None:
    found = planned(*SHAPE, *MEMORY, "--bandwidths", rates)
    assert (found["fits"], found["limits"]) == (True, [])
    assert set(found["tiers"]) == {"device", "host", "nvme"}
    for kinds in found["tiers"].values():
        assert set(kinds) == {"params", "gradients", "optimizer", "second slots", "activations", "buffers", "processes"}
        assert all(isinstance(nbytes, int) for nbytes in kinds.values())
    host = found["tiers"]["host"]
    assert host["processes"] == 200_000_000
    assert found["peak_host_bytes"] == sum(host.values())
    assert found["peak_device_bytes"] == 0
    parameters = GPT2Config(256, 32, 4, 64, 4).num_parameters
    assert parameters * 2 <= found["tiers"]["nvme"]["params"] <= parameters * 3
    step = found["step"]
    assert set(step["exposed"]) == set(LANES) - {"compute"}
    waited = step["host_seconds"] + sum(step["exposed"].values())
    assert step["compute_seconds"] + waited == pytest.approx(step["seconds"])
    assert step["nvme_bytes_read"] > 0 and step["nvme_bytes_written"] > 0


def test_a_fit_with_little_to_spare_is_none_for_sure(rates: Path) -> None:
    """Measured peaks were up to 3.3 % higher. Where freed blocks may not fit, a run is slower."""
    low = rates.with_name("low.json")
    low.write_text(json.dumps(RATES | {"baseline_rss": 1_000_000}))
    options = (*SHAPE[:-2], "--batch-size", "64", "--nvme", "8GiB", "--bandwidths", low)
    found = planned(*options, "--host-memory", "8GiB")
    peak, activations = found["peak_host_bytes"], found["tiers"]["host"]["activations"]
    for host, verdict, is_slower in (
        (int(1.04 * peak), "It may not fit: ", True),
        (int(1.06 * peak), "It fits.", True),
        (peak + min(2 * activations, peak // 2) + 1, "It fits.", False),
    ):
        shown = " ".join(run("plan", *options, "--host-memory", host).stdout.split())
        assert verdict in shown and ("returns freed blocks to the system at once" in shown) == is_slower


@pytest.mark.parametrize("share", [0.9, 1.02])
def test_advice_leaves_the_reserve_that_predictions_need(share: float, rates: Path, tmp_path: Path) -> None:
    """Where smaller buffers can, also for a plan that fits without the reserve."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    content: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(content))
    low = tmp_path / "low.json"
    low.write_text(json.dumps(RATES | {"baseline_rss": 1_000_000}))
    options = (*SHAPE[:-2], "--nvme", "8GiB", "--config", file, "--bandwidths", low)
    peak = planned(*options, "--host-memory", "8GiB")["peak_host_bytes"]
    host = int(share * peak)
    advice = planned(*options, "--host-memory", host, code=int(share < 1))["advice"][0]
    file.write_text(json.dumps(followed(content, advice, tmp_path)))
    after = planned(*options, "--host-memory", host)
    assert after["fits"] and 1.05 * after["peak_host_bytes"] <= host


def test_states_that_auto_keeps_are_no_more_than_there_are(rates: Path) -> None:
    slow = rates.with_name("slow.json")
    slow.write_text(json.dumps(RATES | {"nvme_read": 1e6, "nvme_write": 1e6, "nvme_mixed": 1e6}))
    found = planned(*SHAPE, *MEMORY, "--bandwidths", slow)
    nbytes = sum(found["tiers"]["nvme"][kind] for kind in ("params", "gradients", "optimizer"))
    assert any(f"keeps up to {show_bytes(nbytes)} of states" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ((), 300_000_000),
        (("--checkpoint-activations",), 390_000_000),
        (("--gpus", "2", "--device-memory", "8GiB"), 2_720_000_000),
    ],
)
def test_memory_of_processes_is_assumed_if_nobody_measured_it(options: tuple[str, ...], nbytes: int) -> None:
    found = planned(*SHAPE, *MEMORY, *options)
    assert found["tiers"]["host"]["processes"] == nbytes
    assert found["peak_host_bytes"] == sum(found["tiers"]["host"].values())
    assert f"{show_bytes(nbytes)} are assumed" in " ".join(run("plan", *SHAPE, *MEMORY, *options).stdout.split())
    refused(1, "one layer exceeds host memory", "plan", *SHAPE[2:], *options, "--max-model", "--host-memory", nbytes)


@pytest.mark.parametrize(("load", "said"), [(10_000.0, True), (0.0, False)])
def test_operations_that_are_timed_on_a_busy_machine_have_a_note(
    load: float, said: bool, rates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    for options, is_timed in ((("--this-machine",), True), (MEMORY, False)):
        notes = planned(*SHAPE, *options, "--bandwidths", rates)["notes"]
        assert any("while other processes used the processors" in note for note in notes) == (said and is_timed)


def test_this_machine_times_the_operations_of_the_model(rates: Path) -> None:
    """Another machine's follow from the bandwidths; without these there is no step."""
    here = ("--this-machine", "--bandwidths", rates)
    assert planned(*SHAPE, *here)["step"]["compute"] == "measured here"
    assert "model computes" in (shown := run("plan", *SHAPE, *here).stdout) and "s, measured here" in shown
    assert planned(*SHAPE, *MEMORY, "--bandwidths", rates)["step"]["compute"] == "from FLOP/s"
    assert planned(*SHAPE, "--this-machine")["step"] is None


def test_bytes_are_those_of_a_node() -> None:
    one, eight = (
        planned(*SHAPE[:-1], batch, *MEMORY, "--gpus", gpus, "--device-memory", "1GiB", "--host-memory", "16GiB")
        for batch, gpus in (("2", 1), ("16", 8))
    )
    assert one["step"] is None
    for tier in ("device", "nvme"):
        assert one["tiers"][tier]["params"] <= eight["tiers"][tier]["params"] <= 2 * one["tiers"][tier]["params"]
    assert eight["tiers"]["device"]["buffers"] > 6 * one["tiers"]["device"]["buffers"]


@pytest.mark.parametrize("limit", [{"host": "1KiB"}, {"nvme": "64KiB"}], ids=str)
def test_a_limit_that_the_engine_refuses_does_not_fit(limit: dict[str, str], rates: Path, tmp_path: Path) -> None:
    """With and without a simulation: the same bytes are missing as in the engine's error."""
    (tier,) = limit
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"memory": limit},
    }
    with torch.device("meta"):
        model = GPT2(GPT2Config(256, 32, 4, 64, 4))
    with pytest.raises(OutOfMemoryError, match=rf"infinity\.memory\.{tier}") as refusal:
        infinity.initialize(model=model, config=config)
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(config))
    for options in ((), ("--bandwidths", rates)):
        found = planned(*SHAPE, "--config", file, *MEMORY, *options, code=1)
        assert (found["fits"], found["limits"]) == (False, [tier])
        error = refusal.value
        lacks = f"infinity.memory.{tier} is {show_bytes(error.needed - error.available)} a rank too small: {error.hint}"
        assert found["advice"][0] == lacks


def test_states_that_a_budget_keeps_on_the_device(rates: Path, tmp_path: Path) -> None:
    """They are listed there, the host updates less, and activations that no longer fit name the key."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    }
    found = []
    for memory in ({}, {"device": "8MB"}, {"device_optimizer": 0.5}):
        file = tmp_path / "engine.json"
        file.write_text(json.dumps({**config, "infinity": {"unit_size": "64KiB", "memory": memory}}))
        options = ("--config", file, *MEMORY, "--gpus", "1", "--bandwidths", rates)
        found.append(planned(*SHAPE, *options, "--device-memory", "1GiB"))
    without, filled, half = found
    parts = [each["tiers"]["device"] for each in found]
    assert parts[0]["optimizer"] == parts[0]["params"] == 0 == parts[2]["params"]
    assert min(parts[1]["optimizer"], parts[1]["params"], parts[2]["optimizer"]) > 0
    assert filled["peak_device_bytes"] - parts[1]["activations"] <= 4_000_000
    for each in (filled, half):
        assert each["peak_host_bytes"] < without["peak_host_bytes"]
        assert each["step"]["seconds"] < without["step"]["seconds"]
    lacking = planned(*SHAPE, *options, "--device-memory", half["peak_device_bytes"] - 1, code=1)
    assert "set infinity.memory.device_optimizer to 0" in lacking["advice"][0]


@pytest.mark.parametrize(
    ("options", "tier", "advice"),
    [
        (("--nvme", "1MiB", "--host-memory", "8GiB"), "nvme", "use a larger drive or more nodes"),
        (("--nvme", "8GiB", "--host-memory", "1MiB"), "host", "host memory is "),
        (("--gpus", "1", "--device-memory", "1MiB", *MEMORY), "device", "device memory is "),
    ],
)
def test_a_model_that_does_not_fit_exits_with_1(options: tuple[str, ...], tier: str, advice: str) -> None:
    found = planned(*SHAPE, *options, code=1)
    assert (found["fits"], found["limits"]) == (False, [tier])
    assert advice in found["advice"][0]
    result = run("plan", *SHAPE, *options)
    assert result.exit_code == 1 and f"It does not fit: {tier} " in result.stdout


def test_the_table_has_the_step_and_its_waits(rates: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    slow = rates.with_name("slow.json")
    slow.write_text(json.dumps(RATES | {"nvme_read": 1e6, "nvme_write": 1e6, "nvme_mixed": 1e6}))
    result = run("plan", *SHAPE, *MEMORY, "--bandwidths", slow, "--trace", trace)
    assert result.exit_code == 0, result.output
    for text in (
        "GPT-2, 218 k parameters, 2 sequences of 32 tokens a step; 1 node, the host computes",
        "It fits.",
        "step: ",
    ):
        assert text in result.stdout, result.stdout
    assert "waits for nvme_read" in result.stdout or "waits for nvme_write" in result.stdout
    assert "advice: the model waits" in result.stdout and 'set infinity.memory.host to "auto"' in result.stdout
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(("shares", "said"), [("auto", True), ("equal", False), ([3, 1], False)])
def test_shares_of_folders_are_not_measured(shares: Any, said: bool, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": ["/a", "/b"]}
    config = {"train_batch_size": 1, "zero_optimization": {"offload_optimizer": place}, "aio": {"shares": shares}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("plan", *SHAPE, *MEMORY, "--config", tmp_path / "config.json")
    assert result.exit_code == 0, result.output
    assert ("2 folders: a run measures their speeds" in " ".join(result.stdout.split())) == said


def test_a_speed_that_nobody_measured_is_refused(rates: Path) -> None:
    """It would count as no time."""
    rates.write_text(json.dumps(RATES | {"flops": {"float32": 1e11, "bfloat16": None, "float16": None}}))
    refused(1, "no FLOP/s of bfloat16 (flops.bfloat16)", "plan", *SHAPE, *MEMORY, "--bandwidths", rates)


def test_each_change_is_advised_once(rates: Path) -> None:
    rates.write_text(json.dumps(RATES | {"nvme_read": 1e7, "nvme_write": 1e7, "nvme_mixed": 1e7}))
    changes = [line.partition(": ")[2] for line in planned(*SHAPE, *MEMORY, "--bandwidths", rates)["advice"]]
    assert changes and len(changes) == len(set(changes))


def test_a_budget_moves_bytes_from_the_drive_to_memory(rates: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    content = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    found = []
    for memory in ({}, {"memory": {"host": "auto"}}):
        config.write_text(json.dumps({**content, "infinity": memory}))
        found.append(planned(*SHAPE[:-2], *MEMORY, "--bandwidths", rates, "--config", config))
    without, with_budget = found
    assert with_budget["tiers"]["host"]["optimizer"] == without["tiers"]["nvme"]["optimizer"]
    assert with_budget["step"]["nvme_bytes_read"] == 0 < without["step"]["nvme_bytes_read"]


def test_the_largest_model_is_one_layer_less_than_one_that_does_not_fit() -> None:
    options = (*SHAPE, "--host-memory", "8GiB", "--nvme", "40MiB")
    found = planned(*options[2:], "--max-model")
    layers = found["num_layers"]
    assert found["limits"] == ["nvme"]
    assert found["parameters"] == GPT2Config(256, 32, layers, 64, 4).num_parameters
    planned("--num-layers", layers, *SHAPE[2:], *options[len(SHAPE) :])
    planned("--num-layers", layers + 1, *SHAPE[2:], *options[len(SHAPE) :], code=1)


# -- wear of the drive -------------------------------------------------------------------------------------------------


def test_the_drive_wears_by_the_bytes_of_a_day(rates: Path) -> None:
    """Without a rating, a petabyte stands for it."""
    options = (*SHAPE, *MEMORY, "--bandwidths", rates)
    for given, rated in (((), 10**15), (("--endurance", "1.2PB"), 12 * 10**14)):
        step = planned(*options, *given)["step"]
        a_day = step["nvme_bytes_written"] * 86_400 / step["seconds"]
        assert step["nvme_bytes_written_a_day"] == pytest.approx(a_day, rel=1e-6)
        steps = pytest.approx(rated / step["nvme_bytes_written"])
        assert step["endurance"] == {"rated_bytes": rated, "days": pytest.approx(rated / a_day), "steps": steps}
    shown = run("plan", *options).stdout
    assert "written a day\n  each PB that the drive is rated for lasts " in shown
    assert "\n  the drive's rating of 1.20 PB is reached in " in run("plan", *options, *given).stdout


def test_a_drive_that_is_worn_out_within_a_year_gets_advice(rates: Path, tmp_path: Path) -> None:
    """It names changes with which a step writes less, as the planner sees them."""
    config = tmp_path / "config.json"
    place = {"device": "nvme", "nvme_path": str(tmp_path)}

    def written(infinity: dict[str, Any], *options: str) -> dict[str, Any]:
        zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
        content = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": zero, "infinity": infinity}
        config.write_text(json.dumps(content))
        return planned(*SHAPE[:-2], *MEMORY, "--bandwidths", rates, "--config", config, *options)

    def advised(found: dict[str, Any]) -> list[str]:
        return [line for line in found["advice"] if "rating" in line or "to spare the drive" in line]

    before = written({})
    step = before["step"]
    assert not advised(before)
    year = 365 * step["nvme_bytes_written_a_day"]
    assert not advised(written({}, "--endurance", str(int(1.01 * year))))
    rated = ("--endurance", str(int(0.99 * year)))
    lines = advised(written({}, *rated))
    eight = written({"moments": "8bit"}, *rated)
    ends = [found["step"]["endurance"] for found in (written({}, *rated), eight)]
    lasts = [(f"{float(format(end['steps'], '.3g')):,.0f}", f"({end['days']:.3g} days)") for end in ends]
    assert lines == [
        'to spare the drive, set infinity.memory.host to "auto": no step writes to it',
        f'to spare the drive, set infinity.moments to "8bit": its rating lasts {lasts[1][0]} steps {lasts[1][1]} '
        f"instead of {lasts[0][0]} {lasts[0][1]}",
    ]
    assert written({"memory": {"host": "auto"}})["step"]["nvme_bytes_written"] == 0
    (line,) = advised(written({"moments": "8bit", "durable": True}, "--endurance", "1GB"))
    assert line.startswith("the drive's rating lasts ") and line.endswith("use a drive with a higher rating")


def test_states_in_memory_wear_no_drive(rates: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 2, "bf16": {"enabled": True}}))
    options = (*SHAPE[:-2], *MEMORY, "--bandwidths", rates, "--config", config)
    step = planned(*options)["step"]
    assert step["nvme_bytes_written_a_day"] == 0 and step["endurance"] is None
    assert "rated" not in run("plan", *options).stdout


def test_layers_that_exceed_a_device_fit_in_tiles() -> None:
    """A node has the memory of a DGX-2. Layers of 2.6 B parameters and their gradients exceed a device unless tiled."""
    node = ("--gpus", "16", "--device-memory", "32GB", "--host-memory", "1.5TB", "--nvme", "28TB")
    shape = ("--num-layers", "2", "--hidden-size", "25600", "--num-attention-heads", "256", "--batch-size", "16")
    options = (*shape, "--checkpoint-activations", "--untie-embeddings-and-output-weights", *node)
    assert planned(*options, code=1)["limits"] == ["device"]
    found = planned(*options, "--tile", "2GiB")
    assert found["fits"] and found["tiers"]["nvme"]["optimizer"] > 10**11


def test_models_of_transformers_are_planned(rates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process is measured, unless bandwidths have it."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(
        "infinity.cli.links.bench.process_memory", lambda *_: ProcessMemory(456_000_000, of_files=100_000_000)
    )
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 256,
                "max_position_embeddings": 64,
            }
        )
    )
    options = ("--model", tmp_path, "--seq-length", "32", "--batch-size", "2", *MEMORY)
    found = planned(*options)
    assert found["fits"] and found["tiers"]["host"]["activations"] > 0
    assert found["tiers"]["host"]["processes"] == 456_000_000
    assert "456 MB were measured here" in " ".join(run("plan", *options).stdout.split())
    # Another process may have read the files of libraries first.
    small = ("--model", tmp_path, "--seq-length", "32", "--batch-size", "2", *MEMORY[2:])
    printed = run("plan", *small, "--host-memory", found["peak_host_bytes"] - 1).stdout
    assert "100 MB of that are pages of library files" in " ".join(printed.split())
    assert "library files" not in run("plan", *options).stdout
    for known, nbytes in ((("--bandwidths", rates), 200_000_000), (("--gpus", "1", "--device-memory", "8GiB"), None)):
        assert planned(*options, *known)["tiers"]["host"]["processes"] == (nbytes or 1_360_000_000)


META = "construct the model in infinity.Init"
DEEP = ("--num-layers", "12", "--hidden-size", "512", "--num-attention-heads", "8", *SHAPE[6:])


@pytest.mark.parametrize("share", [0.95, 1.06, 1.5])
def test_a_model_that_has_to_be_constructed_without_memory(share: float) -> None:
    """The run fits, with other changes or none, and a model in memory beside its buffers does not. One advice names
    all that is to be changed.
    """
    host = round(share * planned(*DEEP, *MEMORY)["peak_host_bytes"])
    options = (*DEEP, "--host-memory", host, *MEMORY[2:])
    after = planned(*options, code=int(share < 1))
    said = [line for line in after["advice"] if META in line]
    assert after["fits"] == (share > 1) and len(said) == (share < 1.5)
    assert not said or said[0].startswith("host memory is" if share < 1 else META)
    printed = " ".join(run("plan", *options).stdout.split())
    assert ("It fits if the model is constructed in infinity.Init." in printed) == (share == 1.06)
    assert after["construct"] == ("in infinity.Init" if share < 1.5 else "")
    assert (
        share > 1
        or f"with all changes of this advice, the peak is {show_bytes(after['changed_peak_bytes'])}" in printed
    )


def test_a_model_in_memory_that_a_change_leaves_no_room_for(tmp_path: Path) -> None:
    """Activations that are no longer kept would have held it at the start."""
    shape = (*DEEP[:-4], "--seq-length", "512", "--batch-size", "4")
    before, after = (
        planned(*shape, *extra, *MEMORY)["peak_host_bytes"] for extra in ((), ("--checkpoint-activations",))
    )
    host = round(1.06 * after)
    assert host < before
    (line, *_) = planned(*shape, "--host-memory", host, *MEMORY[2:], code=1)["advice"]
    assert "checkpoint activations" in line and META in line


def test_bf16_is_advised_where_fp32_does_not_fit(tmp_path: Path) -> None:
    """After all other changes: it is another precision."""
    file = tmp_path / "engine.json"
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    sections: dict[str, Any] = {"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}
    file.write_text(json.dumps({"train_batch_size": 2, **sections}))
    shape = ("--num-layers", "2", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "4096")
    for host, is_advised in (("375MB", True), ("400MB", False)):
        options = (*shape, "--seq-length", "32", "--host-memory", host, *MEMORY[2:])
        (line, *_) = planned(*options, "--config", file, code=1)["advice"]
        assert ("set bf16.enabled to true" in line) == is_advised and "no change suffices" not in line


def test_a_cache_that_a_key_of_deepspeed_sets_is_named(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    for key, is_named in (("stage3_max_live_parameters", True), ("sub_group_size", False)):
        file.write_text(json.dumps({"train_batch_size": 2, "zero_optimization": {key: 1e9}}))
        notes = planned(*SHAPE, *MEMORY, "--config", file)["notes"]
        named = [line for line in notes if line.startswith("zero_optimization.stage3_max_live_parameters 1e+09 keeps")]
        assert bool(named) == is_named and all("infinity.cache_bytes 0 keeps none" in line for line in named)


def test_activations_on_nvme_are_listed_there_and_counted_in_the_bytes_of_a_day(rates: Path, tmp_path: Path) -> None:
    found = []
    for device in ("none", "nvme"):
        section = {"device": device, "nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": "64KiB"}
        file = tmp_path / "engine.json"
        file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "infinity": {"activations": section}}))
        found.append(planned(*SHAPE, *MEMORY, "--config", file, "--bandwidths", rates))
        printed = run("plan", *SHAPE, *MEMORY, "--config", file, "--bandwidths", rates).stdout
        assert ("activations: " in printed) == (" written a day" in printed) == (device == "nvme")
    without, moved = found
    assert without["tiers"]["nvme"]["activations"] == without["step"]["activation_bytes_written"] == 0
    nbytes = moved["tiers"]["nvme"]["activations"]
    assert nbytes > 0 < moved["step"]["activation_bytes_written"]
    assert moved["tiers"]["host"]["activations"] < without["tiers"]["host"]["activations"]
    steps = 86_400 / moved["step"]["seconds"]
    assert moved["step"]["nvme_bytes_written_a_day"] == round(moved["step"]["activation_bytes_written"] * steps)
    assert moved["step"]["exposed"]["activations"] > 0
    full = ("--host-memory", "8GiB", "--nvme", nbytes - 1, "--config", file)
    lacking = planned(*SHAPE, *full, code=1)
    assert lacking["limits"] == ["nvme"]


@pytest.mark.parametrize(
    ("spared", "options", "change"),
    [
        (0.3, (), "checkpoint activations (torch.utils.checkpoint around each block"),
        (0.3, ("--checkpoint-activations",), "small: use a micro-batch of 32 with"),
        (0.9, (), "and use a micro-batch of "),
        (0.9, ("--checkpoint-activations",), "use a micro-batch of "),
    ],
)
def test_advice_on_activations_fits(
    spared: float, options: tuple[str, ...], change: str, rates: Path, tmp_path: Path
) -> None:
    """Recomputation comes first, then activations on nvme, then a smaller micro-batch. What is advised is planned."""
    file = tmp_path / "engine.json"
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    section = {"nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": "256KiB"}
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": zero,
        "infinity": {"activations": section},
    }
    file.write_text(json.dumps(content))
    shape = (*SHAPE[:-2], "--nvme", "8GiB", "--config", file, "--bandwidths", rates)
    rates.write_text(json.dumps(RATES | {"baseline_rss": 1_000_000}))
    before = planned(*shape, *options, "--host-memory", "8GiB")
    host = int(before["peak_host_bytes"] - spared * before["tiers"]["host"]["activations"])
    found = planned(*shape, *options, "--host-memory", host, code=1)
    (line,) = found["advice"]
    assert line.startswith("host memory is ") and change in line
    assert merged(content, found["changed"]) == followed(content, line, tmp_path)
    file.write_text(json.dumps(merged(content, found["changed"])))
    expected = found["changed_peak_bytes"]
    if "checkpoint activations" in line:
        options = ("--checkpoint-activations",)
    after = planned(*shape, *options, "--host-memory", host)
    assert after["fits"] and after["peak_host_bytes"] == pytest.approx(expected, rel=0.01) and expected <= host


NO_LIST = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for index in range(40):
            setattr(self, f"layer{index}", torch.nn.Linear(256, 256))

    def forward(self, x):
        for index in range(40):
            x = torch.sigmoid(getattr(self, f"layer{index}")(x))
        return x.mean()

def build():
    return Net(), lambda batch: (torch.zeros(batch, 256),)
"""


def test_blocks_that_nobody_names_are_not_to_be_checkpointed(
    rates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations on nvme are advised instead."""
    monkeypatch.setattr("infinity.cli.links.bench.process_memory", lambda *_: ProcessMemory(1_000_000, of_files=0))
    (tmp_path / "net.py").write_text(NO_LIST)
    file = tmp_path / "engine.json"
    section = {"nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": "256KiB"}
    content = {"train_micro_batch_size_per_gpu": 4096, "infinity": {"activations": section}}
    file.write_text(json.dumps(content))
    options = ("--module", f"{tmp_path / 'net.py'}:build", "--nvme", "8GiB", "--config", file, "--bandwidths", rates)
    before = planned(*options, "--host-memory", "8GiB")
    host = int(before["peak_host_bytes"] - 0.3 * before["tiers"]["host"]["activations"])
    (line,) = planned(*options, "--host-memory", host, code=1)["advice"]
    file.write_text(json.dumps(followed(content, line, tmp_path)))
    after = planned(*options, "--host-memory", host)
    freed = show_bytes(before["peak_host_bytes"] - after["peak_host_bytes"])
    assert after["fits"] and line.endswith(f': set infinity.activations.device to "nvme", which frees {freed}')


def test_parameters_that_max_in_cpu_keeps_leave_memory_by_that_key(tmp_path: Path) -> None:
    """Beside it, infinity.memory.host_params is refused."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": {**nvme, "max_in_cpu": 1e9}, "offload_optimizer": nvme}
    file = tmp_path / "engine.json"
    content: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    file.write_text(json.dumps(content))
    options = ("--num-layers", "40", *SHAPE[2:-2], "--nvme", "8GiB", "--config", file)
    before = planned(*options, "--host-memory", "8GiB")
    host = before["peak_host_bytes"] - before["tiers"]["host"]["params"] // 2
    found = planned(*options, "--host-memory", host, code=1)
    assert "set zero_optimization.offload_param.max_in_cpu to 0" in found["advice"][0]
    file.write_text(json.dumps(merged(content, found["changed"])))
    assert planned(*options, "--host-memory", host)["fits"]


def test_a_model_that_no_change_fits_has_the_least_bytes() -> None:
    options = (*SHAPE[:-2], "--batch-size", "64", "--host-memory", "64MiB", "--nvme", "8GiB")
    (line,) = planned(*options, code=1)["advice"]
    least = "no change suffices. Use a smaller model, more nodes or more memory: 3"
    assert least in line and ", if you " in line and "a micro-batch of 1 with" in line
    printed = run("plan", *options).stdout
    assert "\nconfig of the least run, as JSON" in printed
    assert "with all changes" not in printed and "this advice" not in printed


def test_train_batch_reads_parameters_once_for_all_micro_batches(rates: Path, tmp_path: Path) -> None:
    """A model that fits in the buffers runs as in a loop, and the advice says so."""
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    file = tmp_path / "engine.json"
    for section, is_vertical in (
        ({"unit_size": "64KiB", "prefetch_bytes": "300KB", "cache_bytes": 0}, True),
        ({}, False),
    ):
        file.write_text(json.dumps({**config, "infinity": section}))
        options = (*SHAPE[:-2], *MEMORY, "--config", file, "--bandwidths", rates)
        loop, whole = (planned(*options, *more) for more in ((), ("--train-batch",)))
        read = [each["step"]["nvme_bytes_read"] for each in (loop, whole)]
        assert (read[1] < read[0]) == is_vertical
        assert any("train_batch runs as a loop" in line for line in whole["advice"]) != is_vertical
        kept = [each["tiers"]["host"]["activations"] for each in (loop, whole)]
        assert (kept[1] > 2 * kept[0]) == is_vertical


@pytest.mark.parametrize("nvme_read", [1e7, 1e12])
def test_train_batch_is_advised_where_its_simulated_step_is_shorter(
    rates: Path, tmp_path: Path, nvme_read: float
) -> None:
    rates.write_text(json.dumps(RATES | {"nvme_read": nvme_read, "nvme_mixed": 2 * nvme_read}))
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "offload_param": place},
        "infinity": {"unit_size": "64KiB", "prefetch_bytes": "300KB", "cache_bytes": 0},
    }
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(config))
    options = (*SHAPE[:-2], *MEMORY, "--config", file, "--bandwidths", rates)
    loop, whole = (planned(*options, *more) for more in ((), ("--train-batch",)))
    advised = [line for line in loop["advice"] if "engine.train_batch" in line]
    if nvme_read == 1e7:
        seconds = [f"{each['step']['seconds']:.3g} s" for each in (whole, loop)]
        assert advised and advised[0].endswith(" in place of ".join(seconds))
    else:
        assert not advised
    assert not any("engine.train_batch" in line for line in whole["advice"])


@pytest.mark.parametrize("clip, gpus", [(1.0, 1), (0.0, 1), (1.0, 0)])
def test_room_for_drafts_is_advised_where_they_shorten_the_step(
    rates: Path, tmp_path: Path, clip: float, gpus: int
) -> None:
    """With clipping beside an accelerator, on which the model computes somewhat longer than the host updates."""
    free = {"wakeup_latency": 0, "unit_overhead": 0, "launch_overhead": 0}
    links = dict.fromkeys(("host_to_device", "device_to_host"), 1e10)
    rates.write_text(json.dumps(RATES | links | free | {"memory": 2e9, "flops": {"bfloat16": 3.5e10}}))
    file = tmp_path / "engine.json"

    def prediction(**keys: Any) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "gradient_clipping": clip,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "infinity": {"unit_size": "64KiB", **keys},
        }
        file.write_text(json.dumps(config))
        shape = ("--num-layers", "16", *SHAPE[2:])
        device = ("--gpus", str(gpus), "--device-memory", "1GiB") if gpus else ()
        return planned(*shape, *device, *MEMORY, "--config", file, "--bandwidths", rates)

    before = prediction()
    advised = [line for line in before["advice"] if "second slots" in line]
    if clip and gpus:
        after = prediction(memory={"host": "auto"})
        seconds = [f"{each['step']['seconds']:.3g} s" for each in (after, before)]
        assert len(advised) == 1 and advised[0].endswith(" in place of ".join(seconds))
        assert not any("second slots" in line for line in after["advice"])
    else:
        assert not advised


@pytest.mark.parametrize("update, bandwidth", [("auto", 2.5e9), ("auto", 1e12), ("next_forward", 2.5e9)])
def test_updates_in_forward_are_advised_where_they_shorten_the_step(
    rates: Path, tmp_path: Path, update: str, bandwidth: float
) -> None:
    """The drive takes somewhat longer than the model computes."""
    drive = dict.fromkeys(("nvme_read", "nvme_write", "nvme_mixed"), bandwidth)
    free = {"wakeup_latency": 0, "unit_overhead": 0}  # a step of 43 ms has many units
    rates.write_text(json.dumps(RATES | drive | free | {"memory": 1e12, "flops": {"bfloat16": 3.5e10}}))
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    file = tmp_path / "engine.json"

    def prediction(**keys: Any) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "infinity": {"unit_size": "64KiB", "cache_bytes": 0, "tile_size": 4096, "update": update, **keys},
        }
        file.write_text(json.dumps(config))
        shape = ("--num-layers", "16", *SHAPE[2:])
        return planned(*shape, *MEMORY, "--config", file, "--bandwidths", rates)

    before = prediction()
    advised = [line for line in before["advice"] if "infinity.forward_updates" in line]
    if (update, bandwidth) == ("auto", 2.5e9):
        after = prediction(forward_updates=0.25)
        seconds = [f"{each['step']['seconds']:.3g} s" for each in (after, before)]
        assert advised == [
            f"infinity.forward_updates 0.25 keeps the drive busy during forward: {' in place of '.join(seconds)}"
        ]
        assert not any("infinity.forward_updates" in line for line in after["advice"])
    else:
        assert not advised


def test_the_largest_model_counts_activations_in_their_tier(tmp_path: Path) -> None:
    """With activations on nvme, more layers fit in host memory, and a small drive is the limit."""
    section = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 512, "memory_bytes": "256KiB"}
    file = tmp_path / "engine.json"
    most = []
    for activations, nvme in (({}, "8GiB"), (section, "8GiB"), (section, "64MiB")):
        config = {"train_micro_batch_size_per_gpu": 16, "infinity": {"activations": activations}}
        file.write_text(json.dumps(config))
        options = ("--host-memory", "520MiB", "--nvme", nvme, "--config", file, "--max-model")
        most.append(planned("--hidden-size", "256", *SHAPE[4:-2], *options)["num_layers"])

    in_memory, on_nvme, on_little = most
    assert on_nvme > in_memory
    assert on_little < on_nvme


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (1, ("--model", "/absent"), "cannot read"),
        (1, ("--model", "/absent", "--num-layers", "3"), "leave out the flags of GPT-2's shape"),
        (1, ("--model", "/absent", "--max-model", "--hidden-size", "64"), "leave out the flags of GPT-2's shape"),
        (1, ("--model", "/absent", "--max-model"), "leave out the flags of GPT-2's shape"),
        (1, ("--num-layers", "3", "--max-model"), "--max-model finds the number of layers: leave out --num-layers"),
        (1, ("--gpus", "2"), "give the memory of each of the 2 GPUs: --device-memory"),
        (1, ("--gpus", "2", "--device-memory", "0"), "give the memory of each of the 2 GPUs: --device-memory"),
        (1, ("--device-memory", "2GiB"), "--device-memory is that of a GPU, and the machine has none: give --gpus"),
        (1, ("--host-memory", "0"), "--host-memory must be more than 0, not 0"),
        (2, ("--host-memory", "many"), "--host-memory"),
        (1, ("--this-machine", "--nodes", "2"), "--this-machine describes the machine"),
        (1, ("--hidden-size", "10", "--num-attention-heads", "3"), "not a multiple of num_attention_heads"),
        (1, ("--bandwidths", "/absent.json"), "/absent.json"),
        (1, ("--config", "/absent.json"), "/absent.json"),
        (2, ("--endurance", "much", "--bandwidths", "docs/links.json"), "--endurance"),
        (1, ("--endurance", "1PB"), "--endurance needs the seconds of a step: give --bandwidths"),
        (1, ("--trace", "trace.json"), "--trace needs the seconds of a step: give --bandwidths"),
        (2, ("--tile", "small"), "--tile"),
        (1, ("--tile", "0"), "--tile must be more than 0, not 0"),
        (1, ("--max-model", "--host-memory", "1MiB"), "no GPT-2 of width 768 fits: one layer exceeds host memory"),
        (1, ("--hidden-size", "64", "--num-attention-heads", "4", "--tile", "16KiB"), "tied weights"),
    ],
)
def test_bad_options_are_one_line(code: int, options: tuple[str, ...], text: str) -> None:
    refused(code, text, "plan", *options)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"model_type": "llama"', "config.json is not valid JSON"),
        ('{"model_type": "absent"}', "has no model of the model_type 'absent'"),
        ('{"model_type": ["llama"]}', "has no model of the model_type"),
        ('{"hidden_size": 64}', "has no model_type"),
    ],
)
def test_a_config_that_is_no_model_is_named(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(1, text, "plan", "--model", tmp_path)


def test_each_problem_of_a_config_has_a_line(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"train_batch_size": 0, "gradient_clipping": "much", "unheard_of": 1}))
    result = run("plan", "--config", file)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["infinity", str(file), key] for key in ("train_batch_size", "gradient_clipping", "unheard_of")
    ]


def test_the_help_has_the_defaults_of_the_shape() -> None:
    shown = " ".join(run("plan", "--help").stdout.replace("│", " ").split())
    shape = GPT2Config()
    for value in (shape.num_layers, shape.hidden_size, shape.num_attention_heads, shape.vocab_size, shape.seq_length):
        assert f"by default {value}" in shown


@pytest.mark.parametrize("param", ["nvme", "none"])
def test_slots_of_durable_states_are_counted(param: str, tmp_path: Path) -> None:
    """Two slots for each parameter and optimizer state, wherever training keeps it."""
    file = tmp_path / "engine.json"
    found = []
    for durable in (False, True):
        place = {"device": param, "nvme_path": str(tmp_path)}
        zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
        section = {"durable": durable, "run": "one"} if durable else {}
        file.write_text(json.dumps({"train_batch_size": 2, "zero_optimization": zero, "infinity": section}))
        found.append(planned(*SHAPE[4:-2], "--hidden-size", "512", *MEMORY, "--config", file))
    once, twice = (each["tiers"]["nvme"] for each in found)
    held = sum(found[0]["tiers"][tier][kind] for tier in ("host", "nvme") for kind in ("params", "optimizer"))
    assert once["second slots"] == 0 and twice["second slots"] >= held > 0
    assert sum(twice.values()) == pytest.approx(found[1]["peak_nvme_bytes"], rel=0.01)
    assert once["gradients"] == twice["gradients"]


@pytest.mark.parametrize(("param", "optim"), [("nvme", "nvme"), ("cpu", "nvme"), ("none", "cpu")])
def test_bytes_of_commits_are_those_of_a_durable_run(param: str, optim: str, rates: Path, tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": param, "nvme_path": str(tmp_path)},
        "offload_optimizer": {"device": optim, "nvme_path": str(tmp_path)},
    }
    section = {"durable": True, "run": "one", "cache_bytes": 0, "unit_size": "64KiB"}
    config = {"train_batch_size": 2, "zero_optimization": zero, "infinity": section}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(config))
    step = planned(*SHAPE[:-2], *MEMORY, "--config", file, "--bandwidths", rates)["step"]
    engine, *_ = infinity.initialize(model=GPT2(GPT2Config(256, 32, 4, 64, 4)), config=config)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    moved = []
    with engine:
        for _ in range(3):
            for _ in range(4):
                engine.backward(engine(tokens, tokens))
                engine.step()
            durable = engine.updates.durable
            assert durable is not None
            engine.settle()  # an update that waits for the next use of its unit begins now
            durable.wait()
            moved.append(engine.ledger.snapshot().nvme_bytes_written)
    # A state in memory that is updated while a step is committed is in the next commit, too.
    assert step["nvme_bytes_written"] == pytest.approx((moved[2] - moved[1]) / 4, rel=0.01)
    assert step["nvme_bytes_written_a_day"] > 0
