"""`infinity plan` with a config that a trainer fills, a module of the user's own, and several problems at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.cli.links.bench import ProcessMemory
from infinity.sizes import show_bytes
from infinity.tiers.space import file_system_of
from support.commands import refused, run

DOCS = Path(__file__).parents[2] / "docs"
SHAPE = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "256"),
    *("--seq-length", "32", "--host-memory", "8GiB", "--nvme", "8GiB"),
)
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}
"""Keys of the config in transformers' documentation."""


def written(folder: Path, *sections: dict[str, Any], stage: int = 3, **param: Any) -> Path:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": stage,
        "offload_optimizer": nvme,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    if stage == 3:
        zero["offload_param"] = nvme | param
    content: dict[str, Any] = {"zero_optimization": zero}
    for section in sections:
        content |= section
    file = folder / "ds_config.json"
    file.write_text(json.dumps(content))
    return file


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process is not measured, which differs by some pages."""
    monkeypatch.setattr("infinity.cli.links.bench.process_memory", lambda *_: ProcessMemory(300_000_000, of_files=0))


def planned(*options: Any) -> dict[str, Any]:
    result = run("plan", *SHAPE, *options, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_is_what_a_trainer_fills_in(stage: int, tmp_path: Path) -> None:
    """The plan is that of the values which the output names, with DeepSpeed's defaults."""
    found = planned("--config", written(tmp_path, AUTO, stage=stage))
    assumed, rates = found.pop("notes")
    for value in ("size_per_gpu 8", "accumulation_steps 1", "clipping 1.0", "bf16.enabled false"):
        assert value in assumed
    assert rates == '"auto" in optimizer.params and scheduler.params changes neither bytes nor seconds'
    assert assumed in " ".join(run("plan", *SHAPE, "--config", tmp_path / "ds_config.json").stdout.split())
    values = {
        **AUTO,
        **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1},
        **{"gradient_clipping": 1.0, "bf16": {"enabled": False}},
    }
    same = planned("--config", written(tmp_path, values, stage=stage))
    assert {**same, "notes": None} == {**found, "notes": None}


def test_a_batch_size_of_the_command_replaces_auto(tmp_path: Path) -> None:
    file = written(tmp_path, AUTO)
    found = planned("--config", file, "--batch-size", "2")
    assert not any("train_micro_batch_size_per_gpu" in line for line in found["notes"])
    assert 4 * found["tiers"]["host"]["activations"] == pytest.approx(
        planned("--config", file)["tiers"]["host"]["activations"], rel=0.1
    )


def test_a_config_without_auto_assumes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"train_batch_size": 2}))
    assert planned("--config", file)["notes"] == []


def test_a_model_or_config_that_is_not_given_is_named(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"train_batch_size": 1}))
    model, config = json.loads(run("plan", "--json", "--checkpoint-activations").stdout)["notes"]
    assert "GPT-2 small" in model and "--module" in model and "every state on nvme" in config
    assert json.loads(run("plan", "--json", "--checkpoint-activations", "--config", file).stdout)["notes"] == [model]


def test_mistakes_of_a_config_are_refused_at_once(tmp_path: Path) -> None:
    """Batch sizes too, which depend on the ranks."""
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    file = written(tmp_path, {**sizes, "bf16": {"enabled": True}, "fp16": {"enabled": True}, "gradient_clipping": -1})
    result = run("plan", *SHAPE, "--config", file)
    assert result.exit_code == 1
    for text in ("gradient_clipping: must be", "both enabled", "3 × 2 × 1 = 6, and train_batch_size is 12"):
        assert result.stderr.count(text) == 1, result.stderr


def test_a_folder_in_memory_is_noted(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if file_system_of(shm) != "tmpfs":
        pytest.skip(f"{shm} is no tmpfs here")
    folders = [f"zero_optimization.{name}.nvme_path={shm}" for name in ("offload_param", "offload_optimizer")]
    (note,) = planned("--config", written(tmp_path, {"train_batch_size": 2}), "--set", folders[0], "--set", folders[1])[
        "notes"
    ]
    assert note.startswith(f"{shm} is on tmpfs here, which is memory")


def test_a_folder_that_does_not_exist_is_planned_for(tmp_path: Path) -> None:
    """Under a Trainer the run makes it, and another machine may have it."""
    file, folder = written(tmp_path, AUTO), tmp_path / "absent"
    places = [f"zero_optimization.{name}.nvme_path={folder}" for name in ("offload_param", "offload_optimizer")]
    sets = ["--set", places[0], "--set", places[1]]
    found = planned("--config", file, *sets)
    assert found["fits"] and found["drafted"] == 1.0 and not folder.exists()
    here = json.loads(run("plan", "--json", *SHAPE[:6], "--this-machine", "--config", file, *sets).stdout)["notes"]
    assert any(note.startswith(f"{folder} does not exist here") for note in here)
    assert not any("does not exist" in note for note in found["notes"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_in_16_bits_is_planned_in_its_dtype(dtype: str, tmp_path: Path) -> None:
    """As DeepSpeed's rule has it for a Trainer's run, unless the config enables a section."""
    pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype, **shape, **heads}))
    options = ("--model", tmp_path, "--seq-length", "32", "--nvme", "8GiB", "--host-memory", "8GiB", "--json")

    def found(**bf16: Any) -> dict[str, Any]:
        file = written(tmp_path, AUTO, bf16)
        return json.loads(run("plan", *options, "--config", file).stdout)  # type: ignore[no-any-return]

    by_dtype, chosen = found(), found(bf16={"enabled": True})
    assert (by_dtype["tiers"] == chosen["tiers"]) == (dtype == "bfloat16")
    assert any("config.json has bfloat16" in note for note in by_dtype["notes"]) == (dtype == "bfloat16")
    file = written(tmp_path, AUTO)
    in_fp32 = json.loads(run("plan", *options, "--config", file, "--set", "bf16.enabled=false").stdout)
    assert in_fp32["tiers"] != chosen["tiers"]
    assert not any("config.json has bfloat16" in note for note in in_fp32["notes"])


def test_set_replaces_keys_of_the_config(tmp_path: Path) -> None:
    """As if they were in the file, and of the default config without one. Values are JSON, or texts."""
    changed = {**AUTO, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "infinity": {"unit_size": "64KiB"}}
    expected = planned("--config", written(tmp_path, changed))
    options = ("bf16.enabled=true", "gradient_accumulation_steps=2", "infinity.unit_size=64KiB")
    file = written(tmp_path, AUTO)
    assert planned("--config", file, *(word for each in options for word in ("--set", each))) == expected
    smaller = [
        planned("--set", f"infinity.{key}")["tiers"]["host"]["buffers"] for key in ("debug=false", "unit_size=4096")
    ]
    assert smaller[1] < smaller[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("bf16", "--set bf16: give a key and its value in JSON"),
        ("=1", "--set =1: give a key"),
        ("gradient_clipping.max=1", 'has "auto" at gradient_clipping, and no section'),
        ("unheard_of=1", "unheard_of"),
    ],
)
def test_a_change_that_is_none_is_refused(change: str, said: str, tmp_path: Path) -> None:
    result = run("plan", *SHAPE, "--config", written(tmp_path, AUTO), "--set", change)
    assert result.exit_code == 1 and said in result.stderr, result.stderr


def test_advice_for_a_trainer_names_its_arguments(tmp_path: Path) -> None:
    """A config that is "auto" there follows them, and a number in it would contradict them."""
    file = written(tmp_path, AUTO)
    shape = ("--num-layers", "12", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "512")
    whole = json.loads(run("plan", *shape, "--config", file, "--host-memory", "8GiB", "--json").stdout)
    saved = whole["tiers"]["host"]["activations"]
    options = ("--checkpoint-activations", "--host-memory", whole["peak_host_bytes"] - saved * 9 // 10)
    found = json.loads(run("plan", *shape, "--config", file, *options, "--json").stdout)
    assert "per_device_train_batch_size=" in found["advice"][0], found["advice"]
    assert not {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} & found["changed"].keys()


def test_problems_of_config_machine_and_model_come_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, {"gradient_clipping": "much", "unheard_of": 1})
    options = ("--config", file, "--host-memory", "3x", "--nvme", "4y", "--endurance", "1PB", "--model", "/absent")
    result = run("plan", *options)
    lines = result.stderr.splitlines()
    for text in (
        "gradient_clipping",
        "unheard_of",
        "no batch size",
        "--host-memory",
        "--nvme",
        "--endurance",
        "/absent",
    ):
        assert [line for line in lines if f"{text}" in line.partition(". ")[0]], (text, lines)
    assert result.exit_code == 2 and len(lines) == 7 and "or pass --batch-size" in result.stderr.lower()


@pytest.mark.parametrize(
    ("param", "infinity_keys", "key"),
    [
        ({"max_in_cpu": 1e5}, {}, "zero_optimization.offload_param.max_in_cpu 100000"),
        ({}, {"memory": {"host_params": 100_000}}, "infinity.memory.host_params 100000"),
        ({}, {"memory": {"host": "auto"}}, 'infinity.memory.host "auto"'),
        ({}, {}, ""),
    ],
)
def test_a_key_that_keeps_states_off_the_drive_has_a_line(
    param: dict[str, Any], infinity_keys: dict[str, Any], key: str, tmp_path: Path
) -> None:
    found = planned("--config", written(tmp_path, {"train_batch_size": 2, "infinity": infinity_keys}, **param))
    lines = [line for line in found["notes"] if " keeps " in line]
    host = found["tiers"]["host"]
    held = f"{show_bytes(host['params'])} of parameters"
    if not key:
        assert not lines and host["params"] == 0
    else:
        assert [line.split(" keeps ")[0] for line in lines] == [key] and host["params"] > 0
        assert held in lines[0] and lines[0].endswith(" in host memory instead of on nvme")


def test_one_rank_does_not_wait_for_reduce(tmp_path: Path) -> None:
    """Sums and norms of its gradients are not reduced with others."""
    file = written(tmp_path, AUTO)
    slow = json.loads((DOCS / "links.json").read_text()) | {"memory": 1e8}
    (tmp_path / "links.json").write_text(json.dumps(slow))
    shown = run("plan", *SHAPE, "--config", file, "--bandwidths", tmp_path / "links.json").stdout
    assert "waits for sums and norms of gradients" in shown and "reduce" not in shown


# -- a module of the user's own ----------------------------------------------------------------------------------------

OWN = """
import warnings

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()

class Registers(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(1000, 1000, dtype=torch.bool))

class Depends(Net):
    def forward(self, x):
        return super().forward(x[x.sum(1) > 0])

class Vector(Net):
    def forward(self, x):
        return x * self.blocks[0].weight

class Raises(Net):
    def forward(self, x):
        return super().forward(x[:, :3])

class Warns(Net):
    def forward(self, x):
        if self.blocks[0].weight.dtype == torch.bfloat16:
            warnings.warn("mixed dtypes")
        return super().forward(x)

def inputs(batch):
    return torch.randn(batch, 64)

def build():
    return Net(), inputs

def named(): return Net(), lambda batch: {"x": inputs(batch)}
def warns(): return Warns(), inputs
def registers(): return Registers(), inputs
def depends(): return Depends(), inputs
def vector(): return Vector(), inputs
def raises(): return Raises(), inputs
def alone(): return Net()
def nothing(): pass
def on_cpu(): return Net().to_empty(device="cpu"), inputs
def wrong_inputs(): return Net(), lambda batch: absent
def no_inputs(): return Net(), 3
def frozen(): return Net().requires_grad_(False), inputs
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_a_module_of_ones_own_has_the_plan_of_its_engine(own: Path, tmp_path: Path) -> None:
    """Bytes of states and buffers are those that the engine says it holds, in its words."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": nvme},
    }
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(config))
    options = ("--module", f"{own}:build", "--config", file, "--host-memory", "8GiB", "--nvme", "8GiB", "--json")
    result = run("plan", *options)
    assert result.exit_code == 0, result.output
    host = json.loads(result.stdout)["tiers"]["host"]
    made: dict[str, Any] = {}
    exec(OWN, made)
    with infinity.initialize(model=made["Net"](), config=config)[0] as engine:
        (line,) = (line for line in engine.describe().splitlines() if line.startswith("this rank holds"))
    assert f"in host memory ({show_bytes(host['params'])} params, {show_bytes(host['buffers'])} buffers), " in line


def test_inputs_of_a_module_may_be_keyword_arguments(own: Path) -> None:
    memory = ("--host-memory", "8GiB", "--nvme", "8GiB", "--json")
    found = [run("plan", "--module", f"{own}:{name}", *memory) for name in ("build", "named")]
    assert found[0].exit_code == 0 and found[0].stdout == found[1].stdout


def test_a_change_that_is_tried_warns_of_nothing(own: Path, tmp_path: Path) -> None:
    """A run in bf16 is simulated for the advice, and mixes dtypes there."""
    file = written(tmp_path, {"train_batch_size": 2})
    options = ("--module", f"{own}:warns", "--config", file, "--host-memory", "64MiB", "--nvme", "8GiB")
    result = run("plan", *options)
    assert result.exit_code == 1 and "bf16" in result.stdout and "mixed dtypes" not in result.output


@pytest.mark.parametrize("gpus", [0, 1])
def test_buffers_of_a_module_count_where_the_model_computes(gpus: int, own: Path) -> None:
    memory = ("--host-memory", "8GiB", "--nvme", "8GiB", "--gpus", gpus, *(["--device-memory", "8GiB"] if gpus else []))
    without, buffers = (
        json.loads(run("plan", "--module", f"{own}:{name}", *memory, "--json").stdout)
        for name in ("build", "registers")
    )
    tier = "device" if gpus else "host"
    assert buffers["tiers"][tier]["buffers"] - without["tiers"][tier]["buffers"] == 10**6
    assert buffers[f"peak_{tier}_bytes"] - without[f"peak_{tier}_bytes"] == 10**6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent", "has no function absent"),
        ("depends", "no shape may depend on values. For experts, plan a stand-in that gives each as many tokens"),
        ("vector", "returns a tensor of shape (64, 64). Return the loss, a scalar"),
        ("raises", "forward of Raises on the meta device raises RuntimeError: "),
        ("alone", "alone() returns Net without inputs. Return (module, inputs)"),
        ("nothing", "nothing() returns None. Return (module, inputs)"),
        ("on_cpu", "blocks.0.weight is on cpu, not on the meta device"),
        ("wrong_inputs", "inputs(1) raises NameError: name 'absent' is not defined"),
        ("no_inputs", "the second value of no_inputs() is int. Return a function"),
        ("frozen", "returns a loss without gradients"),
        ("not a name", "--module takes FILE.py:FUNCTION"),
    ],
)
def test_a_module_that_cannot_be_planned_is_named(name: str, text: str, own: Path) -> None:
    refused(1, text, "plan", "--module", f"{own}:{name}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("import absent_package", "raises ModuleNotFoundError: No module named 'absent_package'"),
        ("raise SystemExit(3)", 'exits (3). Guard what trains by if __name__ == "__main__"'),
        ("def build(:", "raises SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_run_is_named(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(content)
    refused(1, text, "plan", "--module", f"{tmp_path / 'own.py'}:build")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "/absent"), "--model and --module both describe the model"),
        (("--max-model",), "--module describes the shape"),
        (("--seq-length", "3"), "--seq-length: build() decides on it"),
        (("--checkpoint-activations",), "--checkpoint-activations: build() decides on it"),
    ],
)
def test_options_that_do_not_go_with_a_module(options: tuple[str, ...], text: str, own: Path) -> None:
    refused(1, text, "plan", "--module", f"{own}:build", *options)


def test_a_language_model_alone_gets_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "llama.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def build():\n"
        "    return LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,\n"
        "        num_attention_heads=4, vocab_size=256, max_position_embeddings=64))\n"
    )
    memory = ("--host-memory", "8GiB", "--nvme", "8GiB")
    results = [
        json.loads(run("plan", "--module", f"{tmp_path / 'llama.py'}:build", *memory, *more, "--json").stdout)
        for more in ((), ("--seq-length", "32"))
    ]
    whole, half = (found["tiers"]["host"]["activations"] for found in results)
    assert whole > 1.5 * half > 0


def test_the_example_of_the_page_is_planned(tmp_path: Path) -> None:
    page = (DOCS / "plan.md").read_text()
    section = page.partition("## A module of your own")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (tmp_path / "net.py").write_text(code)
    result = run("plan", "--module", f"{tmp_path / 'net.py'}:build", "--host-memory", "8GiB", "--nvme", "8GiB")
    assert result.exit_code == 0 and "It fits." in result.stdout, result.output
