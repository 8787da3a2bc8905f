"""`infinity plan`: its JSON and table, models that do not fit, the largest model, refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.gpt2.model import GPT2Config
from infinity.observe.timeline import LANES
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
        assert set(kinds) == {"params", "gradients", "optimizer", "activations", "buffers"}
        assert all(isinstance(nbytes, int) for nbytes in kinds.values())
    host = found["tiers"]["host"]
    assert found["peak_host_bytes"] == 200_000_000 + host["buffers"] + host["activations"]
    assert found["peak_device_bytes"] == 0
    parameters = GPT2Config(256, 32, 4, 64, 4).num_parameters
    assert parameters * 2 <= found["tiers"]["nvme"]["params"] <= parameters * 3
    step = found["step"]
    assert set(step["exposed"]) == set(LANES) - {"compute"}
    assert step["compute_seconds"] + sum(step["exposed"].values()) == pytest.approx(step["seconds"])
    assert step["nvme_bytes_read"] > 0 and step["nvme_bytes_written"] > 0


def test_this_machine_times_the_operations_of_the_model(rates: Path) -> None:
    """Another machine's follow from the bandwidths; without these there is no step."""
    here = ("--this-machine", "--bandwidths", rates)
    assert planned(*SHAPE, *here)["step"]["compute"] == "measured here"
    assert "model computes" in (shown := run("plan", *SHAPE, *here).stdout) and "s, measured here" in shown
    assert planned(*SHAPE, *MEMORY, "--bandwidths", rates)["step"]["compute"] == "from FLOP/s"
    assert planned(*SHAPE, "--this-machine")["step"] is None


def test_bytes_are_those_of_a_node() -> None:
    one, eight = (
        planned(*SHAPE[:-1], batch, *MEMORY, "--gpus", gpus, "--device-memory", "1GiB")
        for batch, gpus in (("2", 1), ("16", 8))
    )
    assert one["step"] is None
    for tier in ("device", "nvme"):
        assert one["tiers"][tier]["params"] <= eight["tiers"][tier]["params"] <= 2 * one["tiers"][tier]["params"]
    assert eight["tiers"]["device"]["buffers"] > 6 * one["tiers"]["device"]["buffers"]


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
    assert "lower infinity.memory.device_optimizer" in lacking["advice"][0]


@pytest.mark.parametrize(
    ("options", "tier", "advice"),
    [
        (("--nvme", "1MiB", "--host-memory", "8GiB"), "nvme", "use a larger drive or more nodes"),
        (("--nvme", "8GiB", "--host-memory", "1MiB"), "host", "host memory lacks"),
        (("--gpus", "1", "--device-memory", "1MiB", *MEMORY), "device", "device memory lacks"),
    ],
)
def test_a_model_that_does_not_fit_exits_with_1(options: tuple[str, ...], tier: str, advice: str) -> None:
    found = planned(*SHAPE, *options, code=1)
    assert (found["fits"], found["limits"]) == (False, [tier])
    assert advice in found["advice"][0]
    result = run("plan", *SHAPE, *options)
    assert result.exit_code == 1 and f"It does not fit: too little {tier}" in result.stdout


def test_the_table_has_the_step_and_its_waits(rates: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    slow = rates.with_name("slow.json")
    slow.write_text(json.dumps(RATES | {"nvme_read": 1e6, "nvme_write": 1e6, "nvme_mixed": 1e6}))
    result = run("plan", *SHAPE, *MEMORY, "--bandwidths", slow, "--trace", trace)
    assert result.exit_code == 0, result.output
    for text in ("GPT-2, 218 k parameters, 2 sequences a step; 1 node, the host computes", "It fits.", "step: "):
        assert text in result.stdout, result.stdout
    assert "waits for nvme_read" in result.stdout or "waits for nvme_write" in result.stdout
    assert "advice: the model waits" in result.stdout and 'set infinity.memory.host to "auto"' in result.stdout
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_speed_that_nobody_measured_is_refused(rates: Path) -> None:
    """It would count as no time."""
    rates.write_text(json.dumps(RATES | {"flops": {"float32": 1e11, "bfloat16": None, "float16": None}}))
    refused(1, "no flops.bfloat16", "plan", *SHAPE, *MEMORY, "--bandwidths", rates)


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
    found = planned(*options, "--max-model")
    layers = found["num_layers"]
    assert found["parameters"] == GPT2Config(256, 32, layers, 64, 4).num_parameters
    planned("--num-layers", layers, *SHAPE[2:], *options[len(SHAPE) :])
    planned("--num-layers", layers + 1, *SHAPE[2:], *options[len(SHAPE) :], code=1)


def test_models_of_transformers_are_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
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
    found = planned("--model", tmp_path, "--seq-length", "32", "--batch-size", "2", *MEMORY)
    assert found["fits"] and found["tiers"]["host"]["activations"] > 0


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (1, ("--model", "/absent"), "cannot read"),
        (1, ("--model", "/absent", "--num-layers", "3"), "leave out the flags of GPT-2's shape"),
        (1, ("--gpus", "2"), "give --gpus and --device-memory"),
        (2, ("--host-memory", "many"), "--host-memory"),
        (1, ("--this-machine", "--nodes", "2"), "--this-machine describes the machine"),
        (1, ("--hidden-size", "10", "--num-attention-heads", "3"), "not a multiple of num_attention_heads"),
        (1, ("--bandwidths", "/absent.json"), "/absent.json"),
        (1, ("--config", "/absent.json"), "/absent.json"),
    ],
)
def test_bad_options_are_one_line(code: int, options: tuple[str, ...], text: str) -> None:
    refused(code, text, "plan", *options)
