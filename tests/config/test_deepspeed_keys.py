"""Every key of DeepSpeed has a verdict.

`deepspeed_keys.txt` lists the keys of DeepSpeed 0.19.8. `list_deepspeed_keys.py` wrote it from the package's sources:
fields and aliases of pydantic models, constants that name the keys of other sections, arguments of schedules and
optimizers, and the keys that `runtime/config.py` reads or refuses at the top level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.config import Config
from infinity.config.deepspeed.keys import TABLE, Verdict
from infinity.config.problems import walk
from infinity.errors import ConfigError

KEYS = (Path(__file__).parent / "deepspeed_keys.txt").read_text().split()
DOCUMENT = (Path(__file__).parents[2] / "docs" / "config.md").read_text()

REFUSED = [key for key, entry in TABLE.items() if entry.verdict is Verdict.REFUSED]
NO_EFFECT = [key for key, entry in TABLE.items() if entry.verdict is Verdict.NO_EFFECT]
KINDS = {"scheduler": {"type": "WarmupLR"}}


def nested(dotted: str, value: object) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b", with the type of a section that needs one."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    for section, kind in KINDS.items():
        if section in value:
            value[section] |= kind
    return value


def test_every_key_of_deepspeed_has_a_verdict() -> None:
    assert len(KEYS) > 300
    honoured = {key.dotted for key in walk(Config)}

    def has_verdict(key: str) -> bool:
        parts = key.split(".")
        sections = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        covered = any(section in TABLE and TABLE[section].whole for section in sections)
        return key in TABLE or key in honoured or covered

    assert [key for key in KEYS if not has_verdict(key)] == []
    assert not has_verdict("zero_optimization.stage3_everything") and not has_verdict("amp_level")


def test_the_table_names_only_keys_of_deepspeed_or_known_old_ones() -> None:
    old = {
        *("nebula", "moe", "comms_config", "monitor_config", "fp32_allreduce", "load_universal_checkpoint", "bfloat16"),
        *(f"bf16.{key}" for key in ("check_overflow", "loss_scale", "initial_scale_power", "loss_scale_window")),
        *(f"bf16.{key}" for key in ("hysteresis", "consecutive_hysteresis", "min_loss_scale")),
        *(f"optimizer.params.{key}" for key in ("fused", "foreach", "capturable", "maximize")),
        *(f"optimizer.params.{key}" for key in ("initial_accumulator_value", "freeze_step", "cuda_aware")),
        *("optimizer.torch_adam", "optimizer.params.comm_backend_name"),
        *(f"zero_optimization.{key}" for key in ("cpu_offload_params", "find_unused_parameters", "aio")),
        "zero_optimization.offload_optimizer.pipeline",
    }
    assert set(TABLE) - set(KEYS) - old == set()


def test_the_documented_table_is_complete() -> None:
    for key in KEYS:
        sections = [key, *(key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1))]
        assert any(f"| `{name}` |" in DOCUMENT for name in sections), key


@pytest.mark.parametrize("key", TABLE)
def test_null_off_and_defaults_are_accepted_silently(key: str) -> None:
    entry = TABLE[key]
    values: list[object] = [None, *entry.neutral]
    if entry.whole:
        values.append({"enabled": False, "anything": 3})
    elif entry.false_is_off:
        values.append(False)
    for value in values:
        config = Config.load({**nested(key, value), "infinity": {"strict": True}})
        assert config.notes.ignored == (), value


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_names_its_value_and_the_fix(key: str) -> None:
    entry = TABLE[key]
    value: object = {"enabled": True} if entry.whole else 7 if entry.false_is_off else False
    with pytest.raises(ConfigError) as caught:
        Config.load(nested(key, value))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: ") and "is not supported; " in problem and problem.endswith(entry.text)


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_effect_is_noted_and_refused_if_strict(key: str) -> None:
    value: object = {"enabled": True} if TABLE[key].whole else 12345
    config = Config.load(nested(key, value))
    assert config.notes.ignored == (key,) and key in config.notes.line()
    assert config.model_dump() == Config.load(nested(key, None)).model_dump()
    with pytest.raises(ConfigError) as caught:
        Config.load({**nested(key, value), "infinity": {"strict": True}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: has no effect here") and TABLE[key].text in problem
