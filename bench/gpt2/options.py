"""Options of the demo's job, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from gpt2.data import VOCAB_SIZE
from gpt2.pretraining import Evaluation
from infinity.errors import ConfigError
from infinity.sim.gpt2 import GPT2Config

BATCH_SIZE = 8
AUTO = "auto"
PROMPTS = ("    def ", "\n\nclass ", "\nimport ")
SAMPLE_BYTES = 200
SHAPE = GPT2Config(vocab_size=VOCAB_SIZE, seq_length=128, num_layers=6, hidden_size=384, num_attention_heads=6)
"""The default model, of 10.8 M parameters."""


NOT_DURABLE = "--load auto goes on with a durable run. Give --durable, or set infinity.durable in the file of --config."


@dataclass(frozen=True)
class JobOptions:
    """Options of a job. Messages name them by the flags of `bench/pretrain_gpt2.py`. Raises ConfigError."""

    shape: GPT2Config = SHAPE
    batch_size: int | None = None
    """Sequences of a step, all ranks together; None: the config's, or `BATCH_SIZE`."""
    train_iters: int | None = None
    """Steps in all, including those before a loaded checkpoint; None: those of the config's schedule, else of the
    checkpoint, else as many as end the job after about `JOB_SECONDS`."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    sample: int | None = None
    """Bytes to write after each of `PROMPTS`; 0: no sample; None: `SAMPLE_BYTES` if the model is the default one."""
    config: str | None = None
    """Configuration of the engine, a JSON file; None: AdamW, every state on NVMe."""
    data: str | None = None
    """File or folder of the text; None: the source of Python's standard library."""
    save: Path | None = None
    """Folder for the checkpoint; None: nothing is saved."""
    load: str | None = None
    """Folder of the checkpoint to resume from; `AUTO`: the last committed step of the durable run, if there is one."""
    durable: bool = False
    """Commit each step to a durable run, without `config`."""
    seed: int = 0
    """Seed of the initial weights and of the order of the text."""
    metrics: str | None = None
    """File for one JSON object per step."""
    nvme_path: str | None = None
    """Folder for states on NVMe, without `config`; None: `nvme` in `output`."""
    output: Path | None = Path("runs/gpt2")
    """Folder for the loss curve and the sample; None: neither is written."""
    plain_bytes: int | None = None
    """Host memory that a plain loop for the same model needs, to show beside the job's; None: not shown."""

    def __post_init__(self) -> None:
        if self.shape.vocab_size < VOCAB_SIZE:
            raise ConfigError(
                f"--vocab-size is {self.shape.vocab_size}, but a byte has {VOCAB_SIZE} values. Give at least "
                f"{VOCAB_SIZE}."
            )
        if self.config is not None and self.nvme_path is not None:
            raise ConfigError(f"--nvme-path is given with --config. Set nvme_path in {self.config} instead.")
        if self.config is not None and self.durable:
            raise ConfigError(f"--durable is given with --config. Set infinity.durable in {self.config} instead.")
        if self.config is None and self.load == AUTO and not self.durable:
            raise ConfigError(NOT_DURABLE)

    @property
    def nvme_folder(self) -> Path:
        return Path(self.nvme_path or (self.output or Path()) / "nvme")

    @property
    def sample_bytes(self) -> int:
        """Return `sample` or its default: in another model than the default one, a byte may take minutes."""
        if self.sample is not None:
            return self.sample
        is_default = replace(self.shape, checkpoint_activations=SHAPE.checkpoint_activations) == SHAPE
        return SAMPLE_BYTES if is_default and self.config is None else 0
