"""The configuration's top level.

Each key is declared once, here or in `storage`, `infinity`, `precision` and `optimization`, with its
type, default, bounds and documentation. docs/config.md is generated from these declarations.

Sections `tensorboard`, `wandb`, `csv_monitor` and `flops_profiler`: reports of training, written by rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Literal

from pydantic import PrivateAttr, model_validator

from infinity.config.batch import Batch, resolve_batch
from infinity.config.draft import Dialect, Fill, Notes
from infinity.config.fields import Count, CountOrZero, Depth, DType, Number, Section, Switch
from infinity.config.infinity import Infinity
from infinity.config.load import load_config
from infinity.config.optimization import SECTIONS, Optimizer, Scheduler
from infinity.config.precision import BF16, FP16, DataTypes, TorchAutocast
from infinity.config.storage import Aio, ZeroOptimization


class Monitor(Section):
    """Base of the monitors."""

    enabled: Switch = False
    """Write the loss, the learning rate and the loss scale of every step."""


class TensorBoard(Monitor):
    """TensorBoard. Needs the package `tensorboard`."""

    output_path: str = ""
    """Folder of the event files; by default the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder of this run in `output_path`."""


class WandB(Monitor):
    """Weights & Biases. Needs the package `wandb`."""

    group: str | None = None
    """Group of runs."""

    team: str | None = None
    """Team that owns the run."""

    project: str = "deepspeed"
    """Project of the run."""


class CSVMonitor(Monitor):
    """Files of comma-separated values."""

    output_path: str = ""
    """Folder of the files; by default the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Folder of this run in `output_path`."""


class FlopsProfiler(Section):
    """Count of the operations of one forward."""

    enabled: Switch = False
    """Count the floating-point operations of one forward, and log them."""

    profile_step: CountOrZero = 1
    """Number of steps before the one whose first forward is counted."""

    module_depth: Depth = -1
    """Depth of the module tree down to which the classes with the most operations are listed; -1: all of it."""

    top_modules: Count = 1
    """Number of classes listed for each depth."""

    detailed: Switch = True
    """List every module with operations, too."""

    output_file: str | None = None
    """File that gets the report instead of the log."""


class Config(Section):
    """The whole configuration; `Config.load` reads it from a dict or a JSON file."""

    train_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; by default derived from the next two."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward pass of one rank; derived by default."""

    gradient_accumulation_steps: Count | None = None
    """Forward and backward passes of one optimizer step; by default derived from the two above, or 1."""

    managed_gradient_accumulation: Switch = True
    """`step()` updates after `gradient_accumulation_steps` backward passes. false: every `step()` updates, with the
    gradients of all backward passes since the last one. `engine.backward` divides by `gradient_accumulation_steps` in
    either case."""

    dataloader_drop_last: Switch = True
    """The dataloader of `training_data` drops the last batch if it is incomplete. false: the last batch is smaller,
    and ranks repeat samples so that all have equally many. DeepSpeed's default is false."""

    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Reduction of gradients over ranks. Clipping and the gradient norm see its result."""

    gradient_clipping: Number = 0.0
    """Largest norm of the whole gradient; gradients of larger norm are scaled down to it. 0: no clipping."""

    steps_per_print: CountOrZero = 10
    """Optimizer steps between progress lines; 0: none."""

    wall_clock_breakdown: Switch = False
    """Log the seconds of forward, backward and step, and those in which the model waited for each lane, every
    `steps_per_print` steps, or every step if that is 0."""

    bf16: BF16 = BF16.model_construct()
    """Training in bfloat16."""

    fp16: FP16 = FP16.model_construct()
    """Training in float16, with a loss scale."""

    torch_autocast: TorchAutocast = TorchAutocast.model_construct()
    """PyTorch's autocast around the forward pass."""

    communication_data_type: DType | None = None
    """Dtype in which gradients are reduced over several ranks. By default fp32 on gloo, and the parameters' dtype on
    NCCL. `fp16` requires fp16 training, for its loss scale. torch's names (`float16` and so on) are accepted, too."""

    data_types: DataTypes = DataTypes.model_construct()
    """Dtypes in which values are stored and accumulated."""

    optimizer: Optimizer = SECTIONS["adamw"].model_construct()
    """The optimizer and its constants."""

    scheduler: Scheduler | None = None
    """The learning rate's schedule; by default the rate is constant."""

    zero_optimization: ZeroOptimization = ZeroOptimization.model_construct()
    """Sharding and tiers of states."""

    aio: Aio = Aio.model_construct()
    """File I/O."""

    tensorboard: TensorBoard = TensorBoard.model_construct()
    """TensorBoard."""

    wandb: WandB = WandB.model_construct()
    """Weights & Biases."""

    csv_monitor: CSVMonitor = CSVMonitor.model_construct()
    """Files of comma-separated values."""

    flops_profiler: FlopsProfiler = FlopsProfiler.model_construct()
    """Count of the operations of one forward."""

    infinity: Infinity = Infinity.model_construct()
    """Keys that DeepSpeed does not have."""

    _notes: Notes = PrivateAttr(default_factory=Notes)

    @classmethod
    def load(
        cls,
        source: Config | Mapping[str, Any] | str | PathLike[str],
        *,
        dialect: Dialect = "infinity",
        fill: Fill | None = None,
    ) -> Config:
        """Return the configuration in a dict or in the JSON file at a path; a Config is returned unchanged.

        dialect: "deepspeed" gives absent keys DeepSpeed's defaults and its meaning of `Adam`. fill: values for keys
        that are "auto". Keys of DeepSpeed that were mapped or have no effect are listed in `notes`.

        Raises ConfigError with one line for each problem.
        """
        if isinstance(source, Config):
            return source
        config, notes = load_config(cls, source, dialect, fill or Fill())
        config._notes = notes
        return config

    @property
    def notes(self) -> Notes:
        """Keys of DeepSpeed that were mapped to others or have no effect, and unresolved "auto" values."""
        return self._notes

    def resolve_batch(self, world_size: int) -> Batch:
        """Return the batch sizes for `world_size` ranks; see `infinity.config.batch.resolve_batch`."""
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
            auto=self.notes.defaults,
        )

    @property
    def scales_loss(self) -> bool:
        """True if gradients are computed in float16, which needs a loss scale."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    @model_validator(mode="after")
    def _keys_together(self) -> Config:
        if conflicts := [text for check in _TOGETHER for text in check(self)]:
            raise ValueError("\n".join(conflicts))  # a line each, as `problems` reads them
        return self


def _batch_sizes_multiply(config: Config) -> Iterator[str]:
    # For any number of ranks, which only the engine knows.
    train, micro, accumulation = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if train and micro and accumulation and train % (micro * accumulation):
        yield (
            "the batch sizes do not multiply: train_batch_size must be train_micro_batch_size_per_gpu × "
            f"gradient_accumulation_steps × ranks, but {micro} × {accumulation} = {micro * accumulation}, and "
            f"train_batch_size is {train}, no multiple of it; change one of them, or omit one to derive it"
        )


def _activations_need_a_folder(config: Config) -> Iterator[str]:
    activations = config.infinity.activations
    if activations.device == "nvme" and not activations.nvme_path and not config.zero_optimization.nvme_paths:
        yield (
            'infinity.activations.device is "nvme", but no folder is named: set infinity.activations.nvme_path to '
            'a folder on a local disk, such as "/local_nvme"'
        )


def _each_folder_has_a_share(config: Config) -> Iterator[str]:
    shares, folders = config.aio.shares, config.zero_optimization.durable_paths
    if folders and not isinstance(shares, str) and len(shares) != len(folders):
        yield (
            f"aio.shares has {len(shares)} numbers for {len(folders)} folders in nvme_path: state one for each, in "
            "their order"
        )


def _durable_states_need_a_folder(config: Config) -> Iterator[str]:
    if config.infinity.durable and not config.zero_optimization.durable_paths:
        yield (
            "infinity.durable is true, but no folder is named: set zero_optimization.offload_optimizer.nvme_path "
            'to a folder on a local disk, such as "/local_nvme"'
        )


def _durable_states_are_as_they_are(config: Config) -> Iterator[str]:
    if config.infinity.durable and config.infinity.frozen != "as_is":
        yield (
            f'infinity.durable is true and infinity.frozen is "{config.infinity.frozen}", which durable states do '
            'not support: set one of them to its default, false or "as_is"'
        )


def _one_16_bit_type(config: Config) -> Iterator[str]:
    if config.bf16.enabled and config.fp16.enabled:
        yield "bf16 and fp16 are both enabled: choose one"
    autocast = config.torch_autocast
    if autocast.enabled and (config.fp16.enabled or (config.bf16.enabled and autocast.dtype == "fp16")):
        other = "fp16" if config.fp16.enabled else "bf16"
        yield (
            f'torch_autocast with dtype "{autocast.dtype}" and {other} are both enabled: choose one. '
            "torch_autocast keeps the parameters in fp32"
        )


def _parameters_have_the_enabled_dtype(config: Config) -> Iterator[str]:
    dtype = config.data_types.param_dtype
    enabled = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if dtype not in (None, enabled):
        yield (
            f'data_types.param_dtype is "{dtype}", but bf16 and fp16 make it "{enabled}": leave it out, or enable '
            "the section of that dtype"
        )


def _fp16_needs_a_loss_scale(config: Config) -> Iterator[str]:
    sums = {
        "communication_data_type": config.communication_data_type,
        "data_types.grad_accum_dtype": config.data_types.grad_accum_dtype,
    }
    for name, dtype in sums.items():
        if dtype == "fp16" and not config.scales_loss:
            yield (
                f'{name} is "fp16", in which unscaled gradients underflow below 6e-8 and overflow above 65504: '
                'use "bf16" or "fp32", or train with "fp16": {"enabled": true}'
            )


def _some_need_all_gradients(config: Config) -> Iterator[str]:
    for name, needs in (("gradient_clipping", config.gradient_clipping > 0), ("fp16", config.scales_loss)):
        if needs and config.infinity.update == "during_backward":
            yield (
                f'infinity.update is "during_backward", but {name} needs the norm of all gradients before the '
                f'first update: use "auto", "next_forward" or "after_backward", or remove {name}'
            )


def _forward_updates_split_the_others(config: Config) -> Iterator[str]:
    share, update = config.infinity.forward_updates, config.infinity.update
    others = {
        f'infinity.update "{update}"': update not in ("auto", "during_backward"),
        "gradient_clipping": config.gradient_clipping > 0,
        "fp16": config.scales_loss,
    }
    excluding = " and ".join(name for name, excludes in others.items() if excludes)
    if share and excluding:
        yield (
            f"infinity.forward_updates is {share:g}, a share of the updates during backward, and there are none "
            f"with {excluding}: remove infinity.forward_updates"
        )


_TOGETHER = (
    _batch_sizes_multiply,
    _activations_need_a_folder,
    _each_folder_has_a_share,
    _durable_states_need_a_folder,
    _durable_states_are_as_they_are,
    _one_16_bit_type,
    _parameters_have_the_enabled_dtype,
    _fp16_needs_a_loss_scale,
    _some_need_all_gradients,
    _forward_updates_split_the_others,
)
"""Checks of keys that depend on each other: config → problems."""
