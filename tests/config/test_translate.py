"""DeepSpeed's keys become those of the schema: mapped, "auto" and null values, dialects, Hjson files."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import infinity
from infinity.config import Config, Dialect, Fill, hidden_size_of
from infinity.config.deepspeed.keys import TABLE
from infinity.config.deepspeed.translate import translate
from infinity.config.problems import walk
from infinity.errors import ConfigError

KNOWN = frozenset(key.dotted for key in walk(Config))


def refusal(config: Any, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(config, **arguments)
    return str(caught.value)


def zero(**keys: object) -> dict[str, Any]:
    return {"zero_optimization": keys}


# -- mapped keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "width"), [({"bf16": {"enabled": True}}, 2), ({"fp16": {"enabled": True}}, 2), ({}, 4)]
)
def test_elements_become_bytes_of_the_parameters_dtype(half: dict[str, Any], width: int) -> None:
    keys = zero(stage3_prefetch_bucket_size=1000, stage3_max_live_parameters=5e3)
    config = Config.load({**half, **keys})
    assert config.infinity.prefetch_bytes == 1000 * width
    assert config.infinity.cache_bytes == 4000 * width  # without those that are fetched ahead
    short = Config.load({**half, **zero(prefetch_bucket_size=1000, max_live_parameters=5e3)})
    assert short.infinity == config.infinity


@pytest.mark.parametrize(("elements", "tile"), [(1, 4096), (10_000, 8192), (1e6, 999_424), (1e14, "auto"), (0, "auto")])
def test_a_sub_group_bounds_the_tile(elements: float, tile: int | str) -> None:
    assert Config.load(zero(sub_group_size=elements)).infinity.tile_size == tile


@pytest.mark.parametrize(
    ("theirs", "ours", "value", "contradiction"),
    [
        (
            zero(offload_param={"device": "nvme", "nvme_path": "/x", "max_in_cpu": 1000}),
            "memory.host_params",
            1000,
            4000,
        ),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), "memory.device_optimizer", 0.7, 0.5),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activations.device", "cpu", "nvme"),
    ],
)
def test_two_keys_may_not_place_states_differently(
    theirs: dict[str, Any], ours: str, value: object, contradiction: object
) -> None:
    section, _, name = ours.partition(".")
    Config.load({**copy.deepcopy(theirs), "infinity": {section: {name: value}}})
    said = refusal({**copy.deepcopy(theirs), "infinity": {section: {name: contradiction}}})
    assert f"sets infinity.{ours} to {value}, which is set to {contradiction}: remove one of them" in said


def test_the_first_of_two_names_decides() -> None:
    config = Config.load(zero(stage3_prefetch_bucket_size=1000, prefetch_bucket_size=2000))
    assert config.infinity.prefetch_bytes == 4000
    assert config.notes.ignored == ("zero_optimization.prefetch_bucket_size",)


def test_an_explicit_key_wins_over_a_mapped_one() -> None:
    config = Config.load({**zero(sub_group_size=8192), "infinity": {"tile_size": 4096}})
    assert config.infinity.tile_size == 4096
    assert config.notes.ignored == ("zero_optimization.sub_group_size",) and config.notes.mapped == ()
    strict = {**zero(sub_group_size=8192), "infinity": {"tile_size": 4096, "strict": True}}
    assert "infinity.strict is true: infinity.tile_size is set and decides" in refusal(strict)


@pytest.mark.parametrize("value", ["5e8", True, -1, [1], float("inf")])
def test_a_size_that_is_no_number_is_named(value: object) -> None:
    message = refusal(zero(stage3_prefetch_bucket_size=value))
    assert "stage3_prefetch_bucket_size: must be a number of elements, at least 0, not" in message


@pytest.mark.parametrize(
    ("content", "dotted", "value"),
    [
        (zero(cpu_offload=True, stage=2), "zero_optimization.offload_optimizer.device", "cpu"),
        (zero(cpu_offload_param=True), "zero_optimization.offload_param.device", "cpu"),
        (zero(cpu_offload_params=True), "zero_optimization.offload_param.device", "cpu"),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        ({"bf16": {"check_grad_overflow": False}}, "infinity.check_nan", False),
        ({"bf16": {"check_overflow": False}}, "infinity.check_nan", False),
        ({"fp32_allreduce": True}, "communication_data_type", "fp32"),
        (zero(aio={"block_size": 8192}), "aio.block_size", 8192),
    ],
)
def test_an_old_key_sets_its_successor(content: dict[str, Any], dotted: str, value: object) -> None:
    config = Config.load(content)
    found: Any = config
    for part in dotted.split("."):
        found = getattr(found, part)
    assert found == value
    assert len(config.notes.mapped) == 1 and dotted.split(".")[0] in config.notes.mapped[0]


def test_an_old_key_beside_its_successor_is_an_error() -> None:
    message = refusal(zero(cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "/x"}))
    assert message.endswith("offload_optimizer.device is set, too: remove cpu_offload")
    assert "must be true or false, not 3" in refusal(zero(cpu_offload=3))


# -- full names at the top level ---------------------------------------------------------------------------------------


def test_full_names_at_the_top_level_are_not_read_as_in_deepspeed() -> None:
    """TRL's `prepare_deepspeed` adds three of them; the keys of the sections decide, and one note names the others."""
    names = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage")
    added = {f"zero_optimization.{name}": 0.9 for name in names} | {"zero_optimization.offload_param": {"device": "x"}}
    base = zero(stage=3, stage3_prefetch_bucket_size=1000)
    config = Config.load(base | added, dialect="deepspeed")
    assert config.model_dump() == Config.load(base, dialect="deepspeed").model_dump()
    assert config.notes.dotted == tuple(added) and config.notes.ignored == ()
    assert all(name in config.notes.line() for name in added)


@pytest.mark.parametrize(
    ("dialect", "key", "says"),
    [
        ("deepspeed", "zero_optimization.reduce_buckt_size", "unknown key; the nearest is zero_optimization.reduce_bu"),
        ("deepspeed", "zero_optimisation.stage", "unknown key; a key of that name is zero_optimization.stage"),
        ("deepspeed", "no.such.section", "unknown key"),
        ("deepspeed", "infinity.unit_size", "move unit_size into the section infinity"),
        ("infinity", "zero_optimization.stage", "move stage into the section zero_optimization"),
        ("infinity", "zero_optimization.reduce_bucket_size", "move reduce_bucket_size into the section zero_optimiz"),
    ],
)
def test_other_names_with_dots_are_refused(dialect: Dialect, key: str, says: str) -> None:
    """Misspelled names, keys of section infinity, and all in a config that is not DeepSpeed's."""
    said = refusal({key: 4096}, dialect=dialect)
    assert said.startswith(f"{key}: ") and says in said


# -- Adam --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "dialect", "decoupled"),
    [
        ("Adam", None, "infinity", False),
        ("Adam", None, "deepspeed", True),
        ("adam", True, "infinity", True),
        ("Adam", True, "deepspeed", True),
        ("Adam", False, "infinity", False),
        ("Adam", False, "deepspeed", False),
        ("AdamW", None, "infinity", True),
        ("AdamW", None, "deepspeed", True),
        ("AdamW", False, "infinity", False),
        ("AdamW", False, "deepspeed", True),  # DeepSpeed reads adam_w_mode for Adam only
    ],
)
def test_adam_w_mode_and_the_dialect_choose_the_decay(
    kind: str, mode: bool | None, dialect: Dialect, decoupled: bool
) -> None:
    params = {"weight_decay": 0.1, "adam_w_mode": mode}
    config = Config.load({"optimizer": {"type": kind, "params": params}}, dialect=dialect)
    assert config.optimizer.type == ("AdamW" if decoupled else "Adam")
    assert config.optimizer.params.weight_decay == 0.1


def test_adam_is_said_where_the_dialects_differ() -> None:
    def notes(dialect: Dialect, **params: object) -> str:
        return Config.load({"optimizer": {"type": "Adam", "params": params}}, dialect=dialect).notes.line()

    assert "weight decay is decoupled, as in DeepSpeed" in notes("deepspeed", weight_decay=0.1)
    assert "weight decay is L2, where DeepSpeed's is decoupled" in notes("infinity", weight_decay=0.1)
    assert notes("infinity") == notes("infinity", weight_decay=0) == notes("deepspeed") == ""
    assert notes("infinity", weight_decay=0.1, adam_w_mode=False) == ""


@pytest.mark.parametrize(
    ("content", "decay"),
    [
        ({"type": "AdamW"}, 0.0),
        ({"params": {"lr": 0.1}}, 0.0),
        ({"type": "Adam"}, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, 0.01),
        ({"type": "Adam", "params": {"torch_adam": True}}, 0.01),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, 0.0),
    ],
)
def test_the_default_decay_is_that_of_deepspeeds_class(content: dict[str, Any], decay: float) -> None:
    assert Config.load({"optimizer": content}, dialect="deepspeed").optimizer.params.weight_decay == decay


# -- dialects ----------------------------------------------------------------------------------------------------------


def test_absent_keys_have_the_defaults_of_the_dialect() -> None:
    ours, theirs = Config.load({}), Config.load({}, dialect="deepspeed")
    assert (ours.zero_optimization.stage, theirs.zero_optimization.stage) == (3, 0)
    assert (ours.gradient_clipping, theirs.gradient_clipping) == (0.0, 1.0)
    assert (ours.dataloader_drop_last, theirs.dataloader_drop_last) == (True, False)
    assert (ours.steps_per_print, theirs.steps_per_print) == (10, 0)
    assert (ours.infinity.norm_of, theirs.infinity.norm_of) == ("model", "model")
    for content in ({"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
        assert Config.load(content, dialect="deepspeed").infinity.norm_of == "optimizer"
    assert theirs.notes.line() == ""
    given = {"gradient_clipping": 0.0, "zero_optimization": {"stage": 2}, "steps_per_print": 7}
    kept = Config.load(given, dialect="deepspeed")
    assert (kept.gradient_clipping, kept.zero_optimization.stage, kept.steps_per_print) == (0.0, 2, 7)


def test_lion_and_the_decaying_schedule_have_deepspeeds_defaults() -> None:
    content = {
        "optimizer": {"type": "Lion"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}},
    }
    config = Config.load(content, dialect="deepspeed")
    assert config.optimizer.params.model_dump() == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    assert config.scheduler is not None and config.scheduler.params.model_dump()["warmup_max_lr"] == 1e-3


def test_threads_and_parameters_follow_deepspeed_in_its_dialect() -> None:
    content = {"aio": {"thread_count": 4, "intra_op_parallelism": 2}, **zero(stage=2, offload_param={"device": "cpu"})}
    config = Config.load(content, dialect="deepspeed")
    assert config.aio.threads == 2 and config.zero_optimization.offload_param.device == "none"
    assert config.notes.ignored == ("aio.thread_count", "zero_optimization.offload_param")
    assert len(refusal(content).splitlines()) == 2


# -- "auto" and null ---------------------------------------------------------------------------------------------------


def test_deepspeeds_states_of_16_bits_are_mapped() -> None:
    """bf16 masters are the exact remainder; values that are not switches, and contradicting values, are reported."""
    section = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = Config.load({"bf16": section})
    assert (config.infinity.master, config.infinity.moments) == ("remainder", "bf16")
    assert config.data_types.grad_accum_dtype == "bf16"
    config = Config.load({"bf16": section, "infinity": {"moments": "8bit"}})
    assert config.infinity.moments == "8bit" and "bf16.bf16_optimizer_states" in config.notes.ignored
    assert Config.load({"bf16": {"enabled": True, "bf16_optimizer_states": False}}).infinity.moments == "fp32"
    config = Config.load({"bf16": {"enabled": False, "bf16_optimizer_states": True}})
    assert config.infinity.moments == "fp32" and config.notes.ignored == ("bf16.bf16_optimizer_states",)
    assert "bf16.bf16_optimizer_states: must be true or false, not 1" in refusal({"bf16": {"bf16_optimizer_states": 1}})


def test_quantised_frozen_weights_are_mapped() -> None:
    """DeepSpeed stores them in 8 bits; other values of the key are refused, and so are durable states with a code."""
    name = "zero_quantized_nontrainable_weights"
    config = Config.load({"zero_optimization": {name: True}})
    assert config.infinity.frozen == "8bit"
    assert f"zero_optimization.{name} true → infinity.frozen 8bit" in config.notes.mapped
    assert Config.load({"zero_optimization": {name: False}}).infinity.frozen == "as_is"
    assert f"zero_optimization.{name}: must be true or false, not 8" in refusal({"zero_optimization": {name: 8}})
    durable = {"infinity": {"durable": True, "frozen": "nf4"}}
    durable["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}
    assert 'infinity.durable is true and infinity.frozen is "nf4"' in refusal(durable)


def test_values_are_read_as_in_deepspeed() -> None:
    """Reductions and dtypes in any case; an unknown warm-up is "log" in DeepSpeed's dialect and an error in ours."""
    config = Config.load({"gradient_allreduce_op": "SUM", "communication_data_type": "BF16"})
    assert config.gradient_allreduce_op == "sum" and config.communication_data_type == "bf16"
    assert 'must be "mean" or "sum", not "max"' in refusal({"gradient_allreduce_op": "MAX"})
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}
    config = Config.load(schedule, dialect="deepspeed")
    assert config.scheduler is not None and config.scheduler.params.warmup_type == "log"  # type: ignore[union-attr]
    assert "scheduler.params.warmup_type cubic → scheduler.params.warmup_type log" in config.notes.mapped
    assert 'must be "log" or "linear", not "cubic"' in refusal(schedule)
    config = Config.load({"optimizer": {"type": "AdamW", "torch_adam": True}}, dialect="deepspeed")
    assert config.optimizer.params.weight_decay == 0.0 and "optimizer.torch_adam" in config.notes.ignored


def test_auto_is_filled_from_arguments_and_other_values_stay() -> None:
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 2.0,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-5}},
        **zero(stage="auto", offload_optimizer={"device": "auto", "nvme_path": "auto"}),
    }
    before = copy.deepcopy(content)
    fill = Fill(
        train_micro_batch_size_per_gpu=3,
        gradient_clipping=9.0,
        bf16=True,
        lr=1e-4,
        betas=(0.8, 0.9),
        eps=1.0,
        stage=2,
        offload_optimizer_device="nvme",
        nvme_path="/x",
    )
    config = Config.load(content, fill=fill)
    assert content == before
    assert config.train_micro_batch_size_per_gpu == 3 and config.gradient_clipping == 2.0 and config.bf16.enabled
    assert config.optimizer.params.model_dump() == {"lr": 1e-4, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.01}
    assert config.zero_optimization.stage == 2 and config.zero_optimization.nvme_paths == (Path("/x"),)


def test_auto_without_a_value_is_the_default_and_is_said() -> None:
    content = {
        "gradient_clipping": "auto",
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "infinity": {"prefetch_bytes": "auto", "update": "auto"},
        **zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", stage="auto"),
    }
    config = Config.load(content, dialect="deepspeed")
    assert config.gradient_clipping == 1.0 and config.zero_optimization.stage == 0
    assert config.infinity.prefetch_bytes == "auto"
    assert config.notes.defaults == ("gradient_clipping", "zero_optimization.stage")
    assert '"auto" without a value, so default: gradient_clipping, zero_optimization.stage' in config.notes.line()


def test_auto_without_a_default_says_what_to_set() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    text = refusal({"scheduler": schedule})
    assert text.startswith('scheduler.params.total_num_steps: is "auto", which only a trainer')
    assert text.endswith("set a number")
    both = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    for content, missing in (
        (both, 'train_micro_batch_size_per_gpu and train_batch_size are "auto", which only a trainer'),
        ({"train_batch_size": "auto"}, 'train_batch_size is "auto", which only a trainer'),
    ):
        with pytest.raises(ConfigError, match=f"^no batch size: {missing}"):
            Config.load(content).resolve_batch(1)
    one = Config.load({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"})
    assert one.resolve_batch(2).micro == 4


def test_the_hidden_size_is_the_largest_of_the_models_config() -> None:
    def size(**config: object) -> int | None:
        return hidden_size_of(SimpleNamespace(config=SimpleNamespace(**config)))

    assert size(hidden_size=64) == 64 and size(hidden_sizes=[8, 32, 16]) == 32
    assert size(text_config=SimpleNamespace(hidden_size=48)) == 48
    assert size() is None and hidden_size_of(nn.Linear(1, 1)) is None
    content = {"bf16": {"enabled": True}, **zero(stage3_prefetch_bucket_size="auto")}
    assert Config.load(content, fill=Fill(hidden_size=100)).infinity.prefetch_bytes == 18_000


@pytest.mark.parametrize("dotted", sorted(KNOWN - {"scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"}))
def test_null_is_the_default(dotted: str) -> None:
    content: dict[str, Any] = {}
    inner = content
    for part in dotted.split(".")[:-1]:
        inner = inner.setdefault(part, {})
    inner[dotted.split(".")[-1]] = None
    if dotted.startswith(("optimizer.", "scheduler.")):
        assert translate(content, KNOWN).content == {dotted.split(".")[0]: {"params": {}}} or dotted.count(".") == 1
    else:
        assert Config.load(content).model_dump() == Config.load({}).model_dump()


# -- refused values of new keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op: must be"),
        ({"torch_autocast": {"enabled": True}}, 'torch_autocast: is enabled and has no dtype: set dtype to "bf16"'),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "in which nothing is cast: set dtype"),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
            'torch_autocast with dtype "fp16" and bf16 are both enabled: choose one',
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "infinity": {"update": "during_backward"}},
            "but fp16 needs the norm of all",
        ),
        ({"data_types": {"keep_in_fp32_modules": ["("]}}, "'(' is no pattern"),
        ({"data_types": {"param_dtype": "bf16"}}, 'bf16 and fp16 make it "fp32"'),
        ({"flops_profiler": {"enabled": True, "module_depth": -2}}, "must be at least -1"),
        ({"wandb": {"enabled": False, "tags": []}}, "wandb.tags: unknown key"),
    ],
)
def test_a_value_that_the_engine_lacks_is_refused(content: dict[str, Any], says: str) -> None:
    message = refusal(content)
    assert says in message and "\n" not in message


def test_values_that_need_nothing_are_taken() -> None:
    config = Config.load(
        {
            "fp16": {"enabled": False, "auto_cast": True},
            "bf16": {"enabled": True, "check_grad_overflow": True},
            "data_types": {"param_dtype": "bfloat16", "keep_in_fp32_modules": ["bias"], "buffer_dtype": "fp16"},
            "gradient_allreduce_op": "mean",
            "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": ["a.B"]},
            "wandb": {"enabled": False, "project": "p"},
        }
    )
    assert config.data_types.param_dtype == "bf16" and config.torch_autocast.dtype == "bf16"
    assert config.data_types.keep_in_fp32_modules == ("bias",) and config.data_types.buffer_dtype == "fp16"
    assert config.notes.ignored == ("torch_autocast.lower_precision_safe_modules",)


# -- problems, notes and files -----------------------------------------------------------------------------------------


def test_all_problems_of_both_kinds_are_reported_at_once() -> None:
    content = {"amp": {"enabled": True}, "pipeline": {"stages": 2}, "aio": {"queue_depth": 0}, "foo": 1}
    lines = refusal(content).splitlines()
    assert [line.split(":")[0] for line in lines] == ["aio.queue_depth", "foo", "amp", "pipeline"]


def test_the_engine_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    content = {"train_batch_size": 1, "memory_breakdown": True, **zero(sub_group_size=4096, overlap_comm=3)}
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=nn.Linear(2, 2), config=content)
    engine.close()
    lines = [record.message for record in caplog.records if record.message.startswith("config: ")]
    assert lines == [f"config: {engine.config.notes.line()}"]
    assert "zero_optimization.sub_group_size 4096 → infinity.tile_size 4096" in lines[0]
    assert "memory_breakdown, zero_optimization.overlap_comm" in lines[0]


def test_notes_are_copied_and_pickled_with_the_configuration() -> None:
    config = Config.load({"memory_breakdown": True})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.notes == config.notes


def test_an_incomplete_batch_is_kept_on_request() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(5, 2))
    for drop, sizes in ((True, [2, 2]), (False, [2, 2, 1])):
        content = {"train_micro_batch_size_per_gpu": 2, "dataloader_drop_last": drop}
        engine, _, loader, _ = infinity.initialize(model=nn.Linear(2, 2), config=content, training_data=data)
        assert loader is not None and [len(batch) for (batch,) in loader] == sizes
        engine.close()


def test_hjson_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  # a comment\n  "train_batch_size": 8, // one\n  "bf16": {"enabled": true,},\n}\n')
    assert Config.load(path).train_batch_size == 8 and Config.load(path).bf16.enabled
    path.write_text('{\n  # a comment\n  "train_batch_size": 8,\n  "train_batch_size": 9\n}\n')
    assert "the key train_batch_size is duplicated" in refusal(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds_config.hjson", "{\n  train_batch_size: 8\n}\n"),
        ("ds_config.json", '{\n  "train_batch_size": 8 // one\n}\n'),
    ],
)
def test_hjson_without_its_library_says_what_to_install(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert Config.load(path).train_batch_size == 8
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert refusal(path).endswith("To read Hjson, pip install hjson")


@given(
    st.sampled_from([*TABLE, *KNOWN]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()) | st.just("auto"),
    st.sampled_from(["infinity", "deepspeed"]),
)
def test_translation_is_pure_and_leaves_no_key_of_the_table(dotted: str, value: object, dialect: Dialect) -> None:
    content: Any = value
    for part in reversed(dotted.split(".")):
        content = {part: content}
    before = repr(content)
    first, second = (translate(content, KNOWN, dialect) for _ in range(2))
    assert repr(content) == before and repr(first) == repr(second)
    left = json.dumps(first.content, default=repr)
    if dotted in TABLE and TABLE[dotted].verdict.value != "mapped":
        assert f'"{dotted.rpartition(".")[2]}"' not in left
