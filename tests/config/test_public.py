"""Published configurations of other projects load unchanged. `public/sources.json` has the source of each file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infinity.config import Batch, Config, Fill, OneCycle, WarmupDecayLR, WarmupLR
from infinity.config.draft import ABSENT, look

PUBLIC = Path(__file__).parent / "public"
SOURCES = json.loads((PUBLIC / "sources.json").read_text())
RANKS = 4
FILL = Fill(
    train_batch_size=32,
    train_micro_batch_size_per_gpu=2,
    gradient_accumulation_steps=4,
    gradient_clipping=0.5,
    bf16=True,
    fp16=False,
    lr=3e-4,
    betas=(0.9, 0.95),
    eps=1e-6,
    weight_decay=0.1,
    warmup_num_steps=10,
    total_num_steps=100,
    hidden_size=512,
)


class Expected(NamedTuple):
    """Important values of a file: stage, devices of parameters and optimizer states, dtype, clipping."""

    stage: int
    param: str
    optimizer: str
    dtype: str
    clipping: float
    batch: Batch = Batch(32, 2, 4)


ONE_STEP = Batch(8, 2, 1)
"""Sizes of files that set or imply an accumulation of 1, or leave it out."""

EXPECTED = {
    "transformers_zero2": Expected(2, "none", "cpu", "bf16", 0.5),
    "transformers_zero3": Expected(3, "cpu", "cpu", "fp16", 1.0, Batch(0, 0, 0)),
    "transformers_docs_nvme": Expected(3, "nvme", "nvme", "fp32", 0.5),
    "accelerate_zero3_offload": Expected(3, "cpu", "cpu", "fp16", 0.5, ONE_STEP),
    "accelerate_zero2_offload": Expected(2, "none", "cpu", "fp16", 0.5, ONE_STEP),
    "accelerate_sp_alst": Expected(3, "none", "none", "bf16", 1.0, ONE_STEP),
    "llama_factory_zero3_offload": Expected(3, "cpu", "cpu", "bf16", 0.5),
    "llama_factory_zero0": Expected(0, "none", "none", "bf16", 0.5),
    "fastchat_zero2": Expected(2, "none", "cpu", "fp32", 1.0),
    "fastchat_zero3": Expected(3, "cpu", "cpu", "fp32", 1.0),
    "open_assistant_zero2": Expected(2, "none", "cpu", "fp32", 0.5),
    "open_assistant_zero3": Expected(3, "none", "none", "bf16", 0.5),
    "llava_zero3_offload": Expected(3, "cpu", "cpu", "bf16", 0.5),
    "chatglm_zero2": Expected(2, "none", "none", "fp32", 1.0, ONE_STEP),
    "baichuan2_zero3": Expected(3, "none", "none", "bf16", 1.0),
    "stanford_alpaca_zero3_offload": Expected(3, "cpu", "cpu", "bf16", 0.5),
    "axolotl_zero3_offload": Expected(3, "cpu", "cpu", "bf16", 0.5),
    "axolotl_zero2_compile": Expected(2, "none", "cpu", "bf16", 0.5),
    "trlx_zero2": Expected(2, "none", "cpu", "fp32", 1.0, ONE_STEP),
    "trl_zero3": Expected(3, "none", "none", "bf16", 0.5),
    "qwen_zero2": Expected(2, "none", "none", "bf16", 0.5),
    "lmflow_zero3": Expected(3, "none", "cpu", "bf16", 0.5),
    "deepspeed_examples_megatron_zero2": Expected(2, "none", "none", "fp16", 1.0, Batch(16, 4, 1)),
    "deepspeed_examples_qanet_1cycle": Expected(0, "none", "none", "fp32", 1.0, Batch(512, 32, 4)),
    "megatron_deepspeed_zero1": Expected(1, "none", "none", "bf16", 1.0, Batch(16, 1, 4)),
    "megatron_deepspeed_zero0": Expected(0, "none", "none", "bf16", 1.0, Batch(64, 2, 8)),
}
NO_SIZES = ("transformers_zero3",)
"""Files without batch sizes, which the Trainer sets itself."""


def raw(name: str) -> dict[str, Any]:
    content = json.loads((PUBLIC / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


def load(name: str) -> Config:
    # A total of 32 is right for an accumulation of 4 only.
    one_step = look(raw(name), "gradient_accumulation_steps") == 1
    fill = Fill(**{**FILL.__dict__, "train_batch_size": 8}) if one_step else FILL
    return Config.load(PUBLIC / f"{name}.json", dialect="deepspeed", fill=fill)


def test_every_file_has_a_source_and_expected_values() -> None:
    files = {path.stem for path in PUBLIC.glob("*.json")} - {"sources"}
    assert files == set(SOURCES) == set(EXPECTED) and len(files) >= 12
    for source in SOURCES.values():
        assert source["repository"].startswith("https://github.com/") and source["path"] and len(source["commit"]) == 40


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_file_loads_with_its_values(name: str) -> None:
    config, expected = load(name), EXPECTED[name]
    zero = config.zero_optimization
    dtype = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    found = (zero.stage, zero.offload_param.device, zero.offload_optimizer.device, dtype, config.gradient_clipping)
    assert found == expected[:5]
    if name not in NO_SIZES:
        assert config.resolve_batch(RANKS) == expected.batch
    assert config.notes.defaults == ()  # every "auto" was filled


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_optimizer_has_its_or_the_filled_values(name: str) -> None:
    config, content = load(name), raw(name)
    if "optimizer" not in content:
        assert "optimizer" not in config.model_fields_set
        return
    params = config.optimizer.params.model_dump()
    assert config.optimizer.type == "AdamW"  # Adam is decoupled in this dialect
    filled = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    absent = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    for key, value in params.items():
        written = look(content, f"optimizer.params.{key}")
        wanted = filled[key] if written == "auto" else absent[key] if written is ABSENT else written
        assert value == (tuple(wanted) if isinstance(wanted, list) else wanted), key


def test_a_published_schedule_has_the_filled_values() -> None:
    decay, warmup = load("stanford_alpaca_zero3_offload").scheduler, load("open_assistant_zero3").scheduler
    assert isinstance(decay, WarmupDecayLR) and isinstance(warmup, WarmupLR)
    assert decay.params.total_num_steps == 100 and decay.params.warmup_num_steps == 10
    assert decay.params.warmup_max_lr == 3e-4 and decay.params.warmup_min_lr == 0
    assert warmup.params.warmup_type == "linear" and warmup.params.warmup_max_lr == 3e-4
    cycle = load("deepspeed_examples_qanet_1cycle").scheduler
    assert isinstance(cycle, OneCycle) and cycle.params.cycle_max_lr == 0.015 and cycle.params.cycle_momentum


def test_published_sizes_of_buffers_map_to_bytes() -> None:
    # 5e8 elements of 4 bytes ahead, 1e9 in all; tiles keep their bound.
    fastchat = load("fastchat_zero3").infinity
    assert (fastchat.prefetch_bytes, fastchat.cache_bytes) == (2_000_000_000, 2_000_000_000)
    assert fastchat.tile_size == "auto"
    # "auto" with hidden size 512, of 2 bytes each.
    llava = load("llava_zero3_offload").infinity
    assert llava.prefetch_bytes == 2 * int(0.9 * 512 * 512)
    axolotl = load("axolotl_zero3_offload").infinity
    assert axolotl.cache_bytes == 0 and axolotl.tile_size == "auto"
    nvme = load("transformers_docs_nvme")
    assert nvme.zero_optimization.nvme_paths == (Path("/local_nvme"),)
    assert (nvme.aio.block_size, nvme.aio.queue_depth, nvme.aio.threads) == (262144, 32, 1)
