"""The JSON of `infinity bench-links`: what `Links` reads, refuses by name and writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.sim.machine import Links

MACHINE = {
    "nvme_read": 3.2e9,
    "nvme_write": 1_600_000_000,
    "nvme_mixed": 3e9,
    "memory": 2e10,
    "host_to_device": None,
    "device_to_host": None,
    "collective": None,
    "flops": {"float32": 1e11, "bfloat16": 2e11, "float16": None},
    "baseline_rss": 240_000_000,
}


def changed(**values: Any) -> str:
    return json.dumps({**MACHINE, **values})


def problems(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        Links.from_json(text, "links.json")
    return raised.value.problems


def test_links_are_read_and_written_without_a_loss() -> None:
    weights = {"float32": 2e9, "bfloat16": None, "float16": None}
    text = changed(machine={"torch": "2.6"}, weights=weights, dram=3e11, wakeup_latency=0.0, unit_overhead=1e-3)
    links = Links.from_json(text)
    assert (links.nvme_write, links.collective, links.baseline_rss) == (1.6e9, None, 240_000_000)
    assert (links.dram, links.wakeup_latency, links.launch_overhead) == (3e11, 0.0, 6e-6)
    assert links.flops == MACHINE["flops"] and links.facts == {"machine": {"torch": "2.6"}}
    assert Links.from_json(links.to_json()) == links
    assert json.loads(links.to_json()) == json.loads(text)


def test_a_dtype_that_is_not_given_is_absent_and_the_names_of_the_config_are_read() -> None:
    assert Links.from_json(changed(flops={"bf16": 5})).flops == {"float32": None, "bfloat16": 5, "float16": None}
    (line,) = problems(changed(flops={"bf16": 5, "bfloat16": 5}))
    assert line == "links.json: flops has bfloat16 and bf16, which are one dtype: remove one of them"


@pytest.mark.parametrize("key", list(MACHINE))
def test_a_missing_key_is_named(key: str) -> None:
    (line,) = problems(json.dumps({name: value for name, value in MACHINE.items() if name != key}))
    assert line == f"links.json: {key} is missing: measure it with infinity bench-links, or add it"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("nvme_read", 0, "nvme_read is 0: give bytes per second, more than 0, or null if the hardware is absent"),
        ("nvme_mixed", -1.5, "nvme_mixed is -1.5: give bytes per second"),
        ("collective", "fast", 'collective is "fast": give bytes per second'),
        ("host_to_device", True, "host_to_device is true: give"),
        ("device_to_host", [1] * 99, "device_to_host is [1, 1, 1"),
        ("nvme_write", 10**400, "nvme_write is 1000"),
        ("memory", None, "memory is null: give bytes per second, more than 0"),
        ("baseline_rss", -1, "baseline_rss is -1: give a whole number of bytes, 0 or more"),
        ("baseline_rss", 2.5, "baseline_rss is 2.5: give a whole number"),
        ("baseline_rss", None, "baseline_rss is null"),
        ("flops", 1e12, 'flops is 1000000000000.0: give an object such as {"bfloat16": 1e12}'),
        ("flops", {"float32": 0}, "flops.float32 is 0: give FLOP/s, more than 0, or null if the device lacks"),
        ("weights", {"float32": 0}, "weights.float32 is 0: give bytes per second, more than 0, or null"),
        ("weights", 3, "weights is 3: give an object"),
        ("dram", 0, "dram is 0: give bytes per second, more than 0, or null: copies slow no processor"),
        ("wakeup_latency", -1e-6, "wakeup_latency is -1e-06: give seconds, 0 or more and below 1"),
        ("launch_overhead", None, "launch_overhead is null: give seconds"),
        ("unit_overhead", 1, "unit_overhead is 1: give seconds"),
        ("flops", {"int8": 1}, "flops.int8 is not known: give float32, bfloat16, float16"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(key: str, value: Any, said: str) -> None:
    (line,) = problems(changed(**{key: value}))
    assert line.startswith(f"links.json: {said}") and len(line) < 200


def test_all_problems_are_listed() -> None:
    assert len(problems("{}")) == len(MACHINE)
    assert len(problems(changed(memory=0, nvme_read=-1, flops={"bf16": "x"}))) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "links.json is not valid JSON: Expecting property name"),
        ("", "links.json is not valid JSON"),
        (b"\xff\xfe{", "links.json is not valid JSON"),
        ("[" * 100_000, "links.json is not valid JSON"),
        ("[1]", "links.json holds [1]: pass the object that infinity bench-links writes"),
        (changed(memory=float("nan")), "NaN is not a number of JSON"),
        (changed(memory=float("inf")), "Infinity is not a number of JSON"),
        ('{"memory": 1, "memory": 2}', "the key memory is duplicated"),
        (changed().replace("20000000000.0", "1e999"), "memory is Infinity: give"),
    ],
)
def test_a_text_that_is_no_such_object_is_refused(text: str | bytes, said: str) -> None:
    (line,) = problems(text)
    assert said in line and line.startswith("links.json")
