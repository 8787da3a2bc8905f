"""The section `infinity`: keys of the engine that DeepSpeed does not have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from infinity.config.fields import (
    CountOrZero,
    Number,
    Section,
    Share,
    Size,
    SizeOrAuto,
    SizeOrZeroOrAuto,
    Switch,
    TileOrAuto,
)
from infinity.config.storage import Activations


class Memory(Section):
    """Budgets of memory. A node's `host` and `nvme` are divided over its ranks.

    States fill `host` before nvme: `offload_param` and `offload_optimizer` with the device nvme name the slowest memory
    that they may use. A placement changes no result, except that of `device_optimizer` without Infinity's kernels."""

    device: Size | None = None
    """Limit on the bytes of device memory for this engine and the model's activations; by default all of it. On an
    accelerator, torch may allocate no more. On the CPU, the limit covers buffers of units and gradients and states of
    offload device `none`, but no activations. `unit_size: auto` is at most a 16th of the limit, or 64MiB if that is
    more. `prefetch_bytes: auto` leaves to activations half of the memory that states and gradients do not take.

    On an accelerator, states that `offload_*` places elsewhere stay on the device while they and the buffers take at
    most `device_states`. Units get room in the order of the model, each with all its states; frozen units come last.
    Without Infinity's kernels for the device, no such state stays, since torch's update gives other bits."""

    device_states: Size | None = None
    """Bytes of an accelerator that states and buffers fill, with or without a limit; what is left is for activations.
    By default half of `device`; without `device`, states stay where `offload_*` places them. The log gives the value
    that fills what the first steps have left. No effect with `device_optimizer`, and on the CPU."""

    device_optimizer: Share | None = None
    """Share of the optimizer states, by elements, that stays on an accelerator although `offload_optimizer` places them
    elsewhere: those of the first units, with their gradients. 0: no state stays there. By default, as many as `device`
    and `device_states` allow; without them, none. A share that does not fit is refused. No effect on the CPU, whose
    memory is the host's. Without Infinity's kernels for the device, an update there rounds as torch's operations do."""

    host: SizeOrAuto | None = None
    """Limit on the bytes of a node's host memory for states and buffers; a plan that needs more is refused. States that
    `offload_*` places on nvme stay in host memory as far as there is room: first parameters, then optimizer states,
    then gradients; with several micro-batches, gradients before optimizer states; on the CPU with one micro-batch,
    optimizer states before parameters. On the CPU, buffers of units and gradients count, activations do not. `auto`: on
    the CPU half of the free memory, since activations need the rest; beside an accelerator, the free memory less an
    eighth and 1 GiB. By default, states stay where `offload_*` places them."""

    host_params: CountOrZero | None = None
    """Number of parameters of each rank that stay in host memory although `offload_param` places them on nvme. With
    `host`, no more than there is room for."""

    nvme: SizeOrAuto | None = None
    """Limit on the bytes of states in a node's `nvme_path`; a plan that needs more is refused. `auto`: the free space
    less 5 %. By default, all of it."""


class Infinity(Section):
    """Keys that DeepSpeed does not have."""

    memory: Memory = Memory.model_construct()
    """Limits on memory."""

    activations: Activations = Activations.model_construct()
    """Tier of the tensors that autograd saves."""

    unit_size: SizeOrAuto = "auto"
    """Largest part of the model, in bytes of parameters, that becomes one unit. Children of a `ModuleList` are units of
    their own. Layers below a 64th of it join the unit of their parent. `auto`: 64MiB, or more on a device with memory
    of its own or with `memory.device`: the size of the largest child of a `ModuleList`, up to a 16th of that memory."""

    prefetch_bytes: SizeOrZeroOrAuto = "auto"
    """Bytes of parameters fetched ahead of their use; 0: no prefetching. `auto`: the next four units, or as many as a
    repeated block has if that is more; fewer if their buffers exceed half of the device memory that states and
    gradients leave."""

    read_ahead_bytes: SizeOrZeroOrAuto = "auto"
    """Bytes of parameters on nvme that are read into host memory before a buffer on the GPU is free for them. `auto`:
    twice the largest unit's shard; 0: none. No effect if the CPU computes: nvme is read into the buffers of units."""

    cache_bytes: SizeOrZeroOrAuto = "auto"
    """Bytes of parameters that stay on the device that computes, so that later passes do not read them again.
    Prefetched ones come in addition. `auto`: all units if they fit in 16 MiB, else none."""

    tile_size: TileOrAuto = "auto"
    """Elements that the update reads, computes and writes at a time, a multiple of 4096. `auto`: 1048576 with the
    optimizer's states on nvme; a whole unit with states in memory, where tiles need no buffers."""

    update: Literal["auto", "during_backward", "after_backward", "next_forward"] = "auto"
    """When units are updated. `during_backward`: each unit once its gradient is complete (an error with clipping or a
    loss scale); `after_backward`: all units before `step()` returns; `next_forward`: each unit before its next use. All
    give the same results. `auto`: `during_backward`, or `next_forward` with clipping or a loss scale."""

    speculate: Literal["auto", False] = "auto"
    """`auto`: with clipping or a loss scale and `update: auto`, update during backward as if no gradient had to be
    scaled, and keep the states of before until `step()` knows the norm. If gradients were clipped or overflowed, the
    update is dropped and made again with the right scale, so the results are the same. It applies to units with
    optimizer states on nvme, and beside an accelerator in host memory, as far as there is room for a second copy of
    parameters and optimizer states: half of the space that is left in `nvme_path`, and in host memory what is left of
    `memory.host`, for three quarters of the parameters. Other units are updated in the next forward. `false`: all
    are."""

    forward_updates: Share = 0.0
    """Share of the parameters that the next forward updates although the others are updated during backward: those of
    units spread evenly over the model, which keep their gradients until then. The drive then works during forward too,
    which shortens steps that it bounds; `infinity plan` advises it. In 16 bits, each of these parameters moves 4 more
    bytes to and from nvme. The results are the same. An error with clipping, a loss scale and other schedules."""

    accumulation_buffers: Switch = False
    """Allocate buffers for the sum of several micro-batches' gradients although `gradient_accumulation_steps` is 1, so
    that `engine.no_sync()` and `engine.set_gradient_accumulation_boundary(False)` work. Needed only if gradients are
    stored in less than `data_types.grad_accum_dtype`; an error then names this key. In stages 0 and 1, gradients are
    reduced once per step with it."""

    master: Literal["remainder", "fp32"] = "remainder"
    """Format of the fp32 master of a bfloat16 parameter. `remainder`: only the low 16 bits, which the parameter lacks;
    `fp32`: a separate copy, 2 bytes more per parameter to store, read and write. Masters of float16 parameters are
    always `fp32`."""

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Format of the optimizer's moments: 4, 2 or 1 bytes per element to store, read and write. `bf16` and `8bit` (with
    one scale per 256 elements) are rounded stochastically; docs/optimizer.md gives the effect on the loss."""

    frozen: Literal["as_is", "8bit", "nf4"] = "as_is"
    """Format in which tiers store frozen parameters of two and more dimensions, such as the base of adapters. `8bit`
    and `nf4`: a code of 8 or 4 bits per element, and one scale per 64 in the dtype of the parameters. Units are decoded
    as they are fetched, so that reads fall to 8.25 or 4.25 bits in bf16. Frozen parameters are rounded once, when the
    engine is constructed, to the values of `infinity.optim.frozen_values`. Refused: durable runs and tensor
    parallelism. `as_is`: their own dtype."""

    seed: CountOrZero = Field(default=0, lt=1 << 64)
    """Seed of the stochastic rounding of `moments`. The rounding depends only on the seed, the number of the step and
    the position of a parameter in the model."""

    adam_threads: CountOrZero = Field(default=0, le=1024)
    """Threads of the update on the CPU; 0: one per processor that the process may use, shared between the ranks of a
    machine. Beside a GPU, three processors of a rank are left to the threads that feed the GPU."""

    norm_of: Literal["model", "optimizer"] = "model"
    """Gradients in the norm of `gradient_clipping`, if some trainable parameters are in no group of the optimizer.
    `model`: of all trainable parameters, as `clip_grad_norm_(model.parameters())`; `optimizer`: of those in its groups,
    as DeepSpeed does in stages 1 to 3 and with 16-bit parameters, and Lightning."""

    optimizer: Literal["native", "torch"] = "native"
    """Code that updates with AdamW, Adam, SGD and Adagrad. `native`: kernels on parts of parameters; `torch`: torch's
    own step on whole parameters, with the bits of a plain loop, as for other classes of torch.optim and your own.
    Lion and AdEMAMix, which torch lacks, are refused with `torch`."""

    durable: Switch = False
    """Keep the states of every step, so that a killed run goes on from the last one with `engine.resume()` or
    `infinity resume`. Parameters and optimizer states, those in memory too, have two slots each in `nvme_path`/`run`:
    twice their space. The folder stays when the engine is closed."""

    run: str = "run"
    """Name of the folder of durable states in `nvme_path`."""

    check_nan: Switch = True
    """Stop with an error if the loss, the gradient norm or a gradient is NaN or infinite, before it is used. With a
    loss scale the step is skipped instead."""

    rank_timeout: Number = 30.0
    """Seconds without a heartbeat after which a rank counts as stopped or unreachable, and ends the job with an
    error that names it. A rank sends one every second, whatever it computes, loads or waits for. 0: no limit, for a
    debugger that stops the process."""

    strict: Switch = False
    """Refuse keys of DeepSpeed that have no effect here. false: a line of the log lists them."""

    debug: Switch = False
    """Expose errors in the lifetime of buffers: released buffers are filled with NaN and reused in the order of their
    release, and pools hold no more buffers than needed. The first step of `engine.train_batch` with blocks is run as
    a loop too, and compared bit by bit."""

    @field_validator("run")
    @classmethod
    def _name_of_a_folder(cls, value: str) -> str:
        if not value or value.startswith(".") or "/" in value or "\0" in value:
            raise ValueError(f"must be the name of a folder, without a slash or a dot at the start, not {value!r}")
        return value
