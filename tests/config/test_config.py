"""The configuration: accepted values, errors for others, and the generated reference."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinity.config import Batch, Config, WarmupCosineLR, WarmupDecayLR
from infinity.config.deepspeed.keys import TABLE, VALUES
from infinity.config.problems import models_in, walk
from infinity.config.reference import reference
from infinity.errors import ConfigError, InfinityError

ROOT = Path(__file__).parents[2]
KNOWN = [key.dotted for key in walk(Config)]


def nested(dotted: str, value: object) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b"."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def refusal(config: Any) -> str:
    """Return the error text for `config`."""
    with pytest.raises(ConfigError) as caught:
        Config.load(config)
    assert "pydantic" not in str(caught.value) and "https://" not in str(caught.value)
    return str(caught.value)


def test_a_full_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
                "gradient_clipping": 1.0,
                "steps_per_print": 100,
                "bf16": {"enabled": True},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
                },
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
                "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
                "aio": {
                    "block_size": "2MiB",
                    "queue_depth": 16,
                    "intra_op_parallelism": 2,
                    "thread_count": 2,
                    "engine": "libaio",
                    "checksum": True,
                },
                "infinity": {"unit_size": "1.5GB", "prefetch_bytes": 5e8, "tile_size": 4096, "update": "next_forward"},
            }
        )
    )
    config = Config.load(path)
    assert config == Config.load(str(path)) == Config.load(json.loads(path.read_text())) == Config.load(config)
    assert config.bf16.enabled and config.gradient_clipping == 1.0
    assert config.optimizer.params.betas == (0.9, 0.95)
    assert isinstance(config.scheduler, WarmupDecayLR) and config.scheduler.params.total_num_steps == 100
    assert config.zero_optimization.nvme_paths == (tmp_path,)
    assert config.aio.block_size == 2 * 2**20 and config.aio.threads == 2
    assert config.aio.engine == "libaio" and config.aio.checksum
    assert config.infinity.unit_size == 1_500_000_000 and config.infinity.prefetch_bytes == 500_000_000
    assert config.resolve_batch(2) == Batch(24, 4, 3)


def test_defaults() -> None:
    config = Config.load({})
    assert config.infinity.unit_size == config.infinity.prefetch_bytes == "auto"
    assert config.optimizer.type == "AdamW" and config.scheduler is None
    assert config.zero_optimization.offload_param.device == "none" and config.zero_optimization.nvme_paths == ()
    assert config.aio.threads == 1 and config.aio.engine == "auto" and not config.aio.checksum


@pytest.mark.parametrize(("written", "decay"), [("Adam", 0.0), ("adam", 0.0), ("AdamW", 0.01), ("adamw", 0.01)])
def test_weight_decay_defaults_to_what_torch_does(written: str, decay: float) -> None:
    assert Config.load({"optimizer": {"type": written}}).optimizer.params.weight_decay == decay
    given = Config.load({"optimizer": {"type": written, "params": {"weight_decay": 0.1}}})
    assert given.optimizer.params.weight_decay == 0.1


def test_a_configuration_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.load({}).gradient_clipping = 2.0  # type: ignore[misc]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"gradient_acumulation_steps": 3},
            "gradient_acumulation_steps: unknown key; the nearest is gradient_accumulation_steps",
        ),
        ({"aio": {"queue_dept": 3}}, "aio.queue_dept: unknown key; the nearest is aio.queue_depth"),
        ({"lr": 1e-3}, "lr: unknown key; a key of that name is optimizer.params.lr"),
        ({"aio": {"unit_size": 1}}, "aio.unit_size: unknown key; a key of that name is infinity.unit_size"),
        (
            {"nvme_path": "/x"},
            "is zero_optimization.offload_param.nvme_path, zero_optimization.offload_optimizer.nvme_path or",
        ),
        ({"learning_rate_of_the_model": 1}, "known here: train_batch_size, train_micro_batch_size_per_gpu"),
        ({"Optimizer": {}}, "the nearest is optimizer"),
        ({"learning_rate": 1e-3}, "learning_rate: unknown key; the nearest is optimizer.params.lr"),
        *(
            ({"optimizer": {"type": "AdamW", "params": {theirs: 0.1}}}, f"the nearest is optimizer.params.{ours}")
            for theirs, ours in {
                "learning_rate": "lr",
                "beta1": "betas",
                "beta2": "betas",
                "adam_beta1": "betas",
                "epsilon": "eps",
                "decay": "weight_decay",
                "wd": "weight_decay",
            }.items()
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "the nearest is zero_optimization.offload_param.device",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "scheduler.params.warmup_steps: unknown key; the nearest is scheduler.params.warmup_num_steps",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}},
            "scheduler.params.total_num_steps: not a key of this scheduler.type",
        ),
        ({"overlap_comm": True}, "a key of that name is zero_optimization.overlap_comm"),
        (
            {"zero_optimization": {"stage3_param_persitance_threshold": 1e5}},
            "the nearest is zero_optimization.stage3_param_persistence_threshold",
        ),
        ({"unheard_of": "auto"}, "unheard_of: unknown key"),
        ({"unheard_of": None}, "unheard_of: unknown key"),
        ({3: 4}, "3: Keys should be strings"),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "activation_checkpointing.partition_activation: unknown key; the nearest is activation_checkpointing.part",
        ),
        ({"flops_profiler": 3}, "flops_profiler: must be a section, { … }, not 3"),
        ({"activation_checkpointing": True}, "activation_checkpointing: must be a section, { … }, not true"),
        (
            {"infinity": {"infinity": {"unit_size": 1}}},
            "infinity.infinity: unknown key; it is in a section of that name already: move its keys up into infinity",
        ),
    ],
)
def test_an_unknown_key_is_named_with_what_was_meant(config: dict[Any, Any], says: str) -> None:
    assert says in refusal(config)


@pytest.mark.parametrize("key", ["unit_size", "prefetch_bytes", "activations.memory_bytes", "memory.host"])
def test_auto_is_in_lower_case(key: str) -> None:
    section: Any = "Auto"
    for name in reversed(key.split(".")):
        section = {name: section}
    assert f'infinity.{key}: write "auto" in lower case, not "Auto"' in refusal({"infinity": section})


def test_the_tables_hold_no_key_that_is_taken() -> None:
    assert not set(TABLE) & set(KNOWN)
    assert set(VALUES) <= set(KNOWN)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"infinity": {"seed": "auto"}}, 'infinity.seed: "auto" is not a value of this key; set one'),
        ({"train_batch_size": 0}, "train_batch_size: must be at least 1, not 0"),
        ({"train_batch_size": 1.5}, "train_batch_size: must be a whole number, not 1.5"),
        ({"train_batch_size": True}, "train_batch_size: must be a number, not true"),
        ({"train_batch_size": "8"}, 'train_batch_size: must be a number, not "8"'),
        ({"gradient_clipping": -1}, "gradient_clipping: must be at least 0, not -1"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: must be a number, not NaN"),
        ({"bf16": True}, "bf16: must be a section, { … }, not true"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled: must be true or false, not "yes"'),
        ({"bf16": {"enabled": 1}}, "bf16.enabled: must be true or false, not 1"),
        (
            {"optimizer": {"type": "Lamb"}},
            'optimizer.type: must be "AdamW", "Adam", "Adagrad", "Lion", "SGD", "AdEMAMix", "Adadelta", "Adafactor", ',
        ),
        (
            {"optimizer": {"type": "Lion", "params": {"eps": 1}}},
            "optimizer.params.eps: not a key of this optimizer.type",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
            "optimizer.params: nesterov is true: set momentum above 0, and leave dampening out",
        ),
        ({"infinity": {"moments": "8-bit"}}, 'infinity.moments: must be "fp32", "bf16" or "8bit", not "8-bit"'),
        ({"optimizer": {"params": {"lr": "1e-3"}}}, 'optimizer.params.lr: must be a number, not "1e-3"'),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas[1]: must be less than 1, not 1.0"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas: must be a list of two numbers, not 0.9"),
        ({"optimizer": {"params": {"eps": 0}}}, "optimizer.params.eps: must be more than 0, not 0"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3, not 4"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            'offload_param.device is "cpu", but in stage 2 all parameters stay',
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "gpu"}}},
            'zero_optimization.offload_param.device: must be "none", "cpu" or "nvme", not "gpu"',
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ""}}},
            'nvme_path: must be the path of a folder, or a list of such paths, not ""',
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": 3}}},
            "zero_optimization.offload_param.nvme_path: must be the path of a folder, or a list of such paths, not 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": []}}},
            "zero_optimization.offload_optimizer.nvme_path: must name at least one folder, not []",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ["/a", True]}}},
            "nvme_path: number 2 of the list must be the path of a folder, not true",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ["/a\0b"]}}},
            "nvme_path: number 1 of the list must be the path of a folder, not",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ["/a/b", "/c", "/a/../a/b/"]}}},
            'nvme_path: lists one folder twice, as "/a/b" and "/a/../a/b"; list each drive\'s folder once',
        ),
        ({"scheduler": {"type": "Cosine"}}, 'scheduler.type: must be "WarmupLR", "WarmupDecayLR", '),
        ({"scheduler": {"params": {}}}, "scheduler.type: is missing"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps: is missing"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 9}}},
            "scheduler.params: warmup_num_steps (9) is more than total_num_steps (5)",
        ),
        ({"aio": {"block_size": "1M"}}, "aio.block_size: '1M' ends in 'M', which is not a unit of size; write"),
        ({"aio": {"block_size": 5000}}, "aio.block_size: must be a multiple of 4096 bytes, such as 4096"),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth: must be at least 1, not 0"),
        ({"aio": {"thread_count": 65}}, "aio.thread_count: must be at most 64, not 65"),
        (
            {"aio": {"thread_count": 4, "intra_op_parallelism": 1}},
            "aio: thread_count (4) is an alias of intra_op_parallelism (1), and they differ: set only one of them",
        ),
        ({"aio": {"shares": "fast"}}, 'aio.shares: must be "auto", "equal" or a list of whole numbers from 1 to 64'),
        ({"aio": {"shares": [1, 0]}}, "one for each folder, not [1, 0]"),
        ({"aio": {"shares": []}}, "one for each folder, not []"),
        ({"aio": {"shares": [True]}}, "one for each folder, not [true]"),
        (
            {
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/b"]}},
                "aio": {"shares": [1, 2, 3]},
            },
            "aio.shares has 3 numbers for 2 folders in nvme_path: state one for each, in their order",
        ),
        ({"aio": {"engine": "posix"}}, 'aio.engine: must be "auto", "libaio" or "io_uring", not "posix"'),
        ({"aio": {"checksum": "crc32"}}, 'aio.checksum: must be true or false, not "crc32"'),
        ({"infinity": {"unit_size": 0}}, "infinity.unit_size: must be more than 0, not 0"),
        ({"infinity": {"memory": {"host": 0}}}, "infinity.memory.host: must be more than 0, not 0"),
        ({"infinity": {"memory": {"nvme": "much"}}}, "infinity.memory.nvme: 'much' is not a size"),
        ({"infinity": {"prefetch_bytes": "-1MiB"}}, "infinity.prefetch_bytes: a size cannot be negative"),
        ({"infinity": {"prefetch_bytes": True}}, "infinity.prefetch_bytes: True is not a size"),
        ({"infinity": {"tile_size": 9000}}, "infinity.tile_size: must be a multiple of 4096 elements, such as 8192"),
        (
            {"infinity": {"tile_size": 0.5}},
            'infinity.tile_size: must be a whole number of elements from 1, or "auto", not 0.5',
        ),
        (
            {"infinity": {"tile_size": "8k"}},
            'infinity.tile_size: must be a whole number of elements from 1, or "auto", not "8k"',
        ),
        ({"infinity": {"update": "later"}}, "infinity.update: must be"),
        (
            {"infinity": {"update": "during_backward"}, "gradient_clipping": 1.0},
            'infinity.update is "during_backward", but gradient_clipping needs the norm',
        ),
        ({"infinity": {"forward_updates": 2}}, "infinity.forward_updates: must be at most 1, not 2"),
        (
            {"infinity": {"forward_updates": 0.25, "update": "next_forward"}, "gradient_clipping": 1.0},
            "infinity.forward_updates is 0.25, a share of the updates during backward, and there are none with "
            'infinity.update "next_forward" and gradient_clipping: remove',
        ),
        ({"communication_data_type": "int8"}, 'communication_data_type: must be "fp32", "bf16" or "fp16", not "int8"'),
        ({"data_types": {"grad_accum_dtype": 3}}, "data_types.grad_accum_dtype: must be"),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "float16"},
            'communication_data_type is "fp16", in which unscaled gradients underflow below 6e-8',
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}},
            'data_types.grad_accum_dtype is "fp16", in which unscaled gradients',
        ),
        ([], "a configuration is a dict or the path of a JSON file, not list"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_can(config: Any, says: str) -> None:
    message = refusal(config)
    assert says in message and "\n" not in message


@pytest.mark.parametrize("states", ["offload_param", "offload_optimizer"])
def test_nvme_without_a_folder_says_which_key_to_add(states: str) -> None:
    message = refusal({"zero_optimization": {states: {"device": "nvme"}}})
    assert message.startswith(f"zero_optimization.{states}.nvme_path: is missing") and '"nvme_path": "/' in message
    # Named and unused, so that one edit switches the device.
    Config.load({"zero_optimization": {states: {"device": "cpu", "nvme_path": "/x"}}})


def zero(param: str, optimizer: str, param_path: object, optimizer_path: object) -> dict[str, Any]:
    offload_param = {"device": param, "nvme_path": param_path}
    offload_optimizer = {"device": optimizer, "nvme_path": optimizer_path}
    return {"zero_optimization": {"offload_param": offload_param, "offload_optimizer": offload_optimizer}}


def test_the_folder_is_that_of_the_states_on_nvme() -> None:
    def paths(param: str, optimizer: str) -> tuple[Path, ...]:
        return Config.load(zero(param, optimizer, "/a", "/b")).zero_optimization.nvme_paths

    assert paths("nvme", "cpu") == (Path("/a"),)
    assert paths("none", "nvme") == (Path("/b"),)
    assert paths("cpu", "cpu") == ()
    assert "share their folders" in refusal(zero("nvme", "nvme", "/a", "/b"))


def test_several_folders_are_a_list() -> None:
    def paths(param_path: object, optimizer_path: object) -> tuple[Path, ...]:
        return Config.load(zero("nvme", "nvme", param_path, optimizer_path)).zero_optimization.nvme_paths

    assert paths(["/a", "/b"], ["/a", "/b"]) == (Path("/a"), Path("/b"))
    assert paths([Path("/a"), "~"], (Path("/a"), Path.home())) == (Path("/a"), Path.home())
    assert paths("/a", ["/a"]) == (Path("/a"),)
    assert "in the same order" in refusal(zero("nvme", "nvme", ["/a", "/b"], ["/b", "/a"]))
    assert "share their folders" in refusal(zero("nvme", "nvme", ["/a", "/b"], "/a"))


def test_one_folder_by_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "other").symlink_to("disk")
    paths = [str(tmp_path / "disk"), str(tmp_path / "other")]
    assert "lists one folder twice" in refusal(zero("nvme", "none", paths, None))


@pytest.mark.parametrize(
    ("section", "threads"),
    [
        ({}, 1),
        ({"intra_op_parallelism": 3}, 3),
        ({"thread_count": 3}, 3),
        ({"thread_count": 3, "intra_op_parallelism": 3}, 3),
        ({"thread_count": None, "intra_op_parallelism": 3}, 3),
    ],
)
def test_threads_have_two_names(section: dict[str, Any], threads: int) -> None:
    assert Config.load({"aio": section}).aio.threads == threads


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"bf16": 3, "aio": {"queue_depth": 0}, "amp": {"enabled": True}, "foo": 1})
    assert len(caught.value.problems) == 4 == len(str(caught.value).splitlines())
    assert isinstance(caught.value, InfinityError) and isinstance(caught.value, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems and str(again) == str(caught.value)


@given(
    st.sampled_from(KNOWN), st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none())
)
def test_any_value_of_any_key_is_taken_or_refused_by_name(dotted: str, value: object) -> None:
    try:
        Config.load(nested(dotted, value))
    except ConfigError as error:
        assert all(line.startswith((dotted.split(".")[0], "infinity.update")) for line in error.problems)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_json_is_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{\n  "steps_per_print": 3,\n  "bf16": {"enabled": True}\n}')
    assert refusal(path).startswith(f"{path}, line 3, column 23: is not JSON")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1]", "must hold one JSON object, { … }, not a list"),
        (b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        (b'{"aio": {"queue_depth": 1, "queue_depth": 2}}', "the key queue_depth is duplicated"),
        (b'{"aio": {"queue_depth": 0}}', "aio.queue_depth: must be at least 1, not 0"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}: ") and says in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json").endswith(
        "none.json: cannot be read as configuration: No such file or directory"
    )


# -- batch sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world", "batch"),
    [
        (24, 4, 3, 2, Batch(24, 4, 3)),
        (24, 4, None, 2, Batch(24, 4, 3)),
        (24, None, 3, 2, Batch(24, 4, 3)),
        (None, 4, 3, 2, Batch(24, 4, 3)),
        (24, None, None, 2, Batch(24, 12, 1)),
        (None, 4, None, 2, Batch(8, 4, 1)),
    ],
)
def test_two_batch_sizes_or_one_give_the_rest(
    train: int | None, micro: int | None, accumulation: int | None, world: int, batch: Batch
) -> None:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    assert Config.load(sizes).resolve_batch(world) == batch
    assert Config.load({name: size for name, size in sizes.items() if size is not None}).resolve_batch(world) == batch


@pytest.mark.parametrize(
    ("sizes", "world", "says"),
    [
        ((36, 4, 3), 2, "4 × 3 × 2 = 24, and train_batch_size is 36"),
        ((32, 5, None), 2, "5 × 3 × 2 = 30, and train_batch_size is 32"),
        ((3, None, None), 2, "1 × 1 × 2 = 2, and train_batch_size is 3"),
        ((1, None, None), 2, "1 × 1 × 2 = 2, and train_batch_size is 1"),
        ((2, 4, None), 1, "4 × 1 × 1 = 4, and train_batch_size is 2"),
        ((None, None, 3), 1, "neither train_micro_batch_size_per_gpu nor"),
        ((None, None, None), 1, "neither train_micro_batch_size_per_gpu nor"),
    ],
)
def test_batch_sizes_that_do_not_multiply_are_shown(
    sizes: tuple[int | None, int | None, int | None], world: int, says: str
) -> None:
    train, micro, accumulation = sizes
    config = Config(
        train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation
    )
    with pytest.raises(ConfigError) as caught:
        config.resolve_batch(world)
    assert says in str(caught.value)


TOGETHER = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
}


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ({}, []),
        ({"gradient_clipping": -1}, ["gradient_clipping: must be"]),
        ({"gradient_clipping": threading.Lock()}, ["gradient_clipping: "]),
        ({"foo": 1, "infinity": {"bar": 2}}, ["foo: unknown key", "infinity.bar: unknown key"]),
        ({"optimizer": {"type": "AdamWW", "params": {"betas": [1]}}}, ["optimizer.type: must be"]),
    ],
)
def test_keys_that_depend_on_each_other_are_reported_beside_wrong_ones(
    beside: dict[str, Any], found: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(TOGETHER | beside)
    expected = [*found, "the batch sizes do not multiply: ", "bf16 and fp16 are both enabled"]
    problems = caught.value.problems
    assert len(problems) == len(expected) and all(map(str.startswith, sorted(problems), sorted(expected)))


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_a_wrong_value_makes_no_conflict_of_its_default(section: str) -> None:
    """Without the wrong device there is no folder, which durable states need."""
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}
    zero |= {section: {"device": "nvmee", "nvme_path": "."}}
    with pytest.raises(ConfigError) as caught:
        Config.load({"train_batch_size": 1, "zero_optimization": zero, "infinity": {"durable": True}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"zero_optimization.{section}.device: must be")


def test_a_misspelt_section_makes_no_conflict() -> None:
    zero = {"stage": 3, "offload_optimiser": {"device": "nvme", "nvme_path": "."}}
    with pytest.raises(ConfigError) as caught:
        Config.load({"train_batch_size": 1, "zero_optimization": zero, "infinity": {"durable": True}})
    (problem,) = caught.value.problems
    assert problem.startswith("zero_optimization.offload_optimiser: unknown key")


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_any_two_batch_sizes_that_multiply_give_the_third(micro: int, accumulation: int, world: int) -> None:
    batch = Batch(micro * accumulation * world, micro, accumulation)
    given = ("train_batch_size", batch.train), ("train_micro_batch_size_per_gpu", micro)
    for left_out in range(3):
        sizes = [*given, ("gradient_accumulation_steps", accumulation)]
        del sizes[left_out]
        assert Config.load(dict(sizes)).resolve_batch(world) == batch


# -- documentation -----------------------------------------------------------------------------------------------------


def test_every_key_is_documented() -> None:
    assert [key.dotted for key in walk(Config) if not key.description] == []
    assert [key.dotted for key in walk(Config) for model in models_in(key.field.annotation) if not model.__doc__] == []


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m infinity.config"
    leaves = [key.dotted for key in walk(Config) if not models_in(key.field.annotation)]
    assert [dotted for dotted in [*leaves, *TABLE] if f"| `{dotted}` |" not in written] == []


def test_the_example_of_the_reference_is_a_configuration() -> None:
    example = reference().split("```json")[1].split("```")[0]
    assert Config.load(json.loads(example)).resolve_batch(1) == Batch(4, 4, 1)


def test_a_cosine_schedule_has_ratios() -> None:
    schedule = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2, "cos_min_ratio": 0.1}}
    scheduler = Config.load({"scheduler": schedule}).scheduler
    assert isinstance(scheduler, WarmupCosineLR) and scheduler.params.cos_min_ratio == 0.1


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "float16", "bfloat16", "float32", "torch.bfloat16"])
def test_dtypes_have_several_names(name: str) -> None:
    given = {"fp16": {"enabled": True}, "communication_data_type": name, "data_types": {"grad_accum_dtype": name}}
    config = Config.load(given)
    short = name.removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    assert (config.communication_data_type, config.data_types.grad_accum_dtype) == (short, short)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"optimizer": {"type": "\ud800"}}, "optimizer.type"),
        ({"zero_optimization": {"offload_param": {"nvme_path": ["/a", "/b\udcff"]}}}, r"nvme_path\[1\]"),
        ({"\udfff": 1}, r"\\udfff"),
    ],
)
def test_text_that_is_no_utf8_is_refused_with_its_key(content: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Pydantic raises UnicodeEncodeError for it."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    for source in (content, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=key + ": .* has a character that UTF-8 has no bytes for"):
            Config.load(source)


def test_a_dict_that_holds_itself_is_refused() -> None:
    content: dict[str, Any] = {}
    content["monitor"] = content
    with pytest.raises(ConfigError, match="more than 100 levels deep"):
        Config.load(content)
