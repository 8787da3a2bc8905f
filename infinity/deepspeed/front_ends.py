"""Accelerate's view of ranks without an accelerator, and the optimizers and paths that it fills in.

Accelerate 1.15 chooses no backend there, unless its arguments select the CPU. It then takes each rank for the only
process, although it has initialized a process group through DeepSpeed's interface. Every rank would train on the same
data.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from infinity.deepspeed.engine_names import read
from infinity.errors import ConfigError, UsageError
from infinity.rules import RULES


def name_backend() -> None:
    """Give an Accelerate state that is being built the backend of the process group, if it chose none."""
    state = _state()
    if "num_processes" not in state and state.get("backend", "") is None:
        state["backend"] = dist.get_backend()


def check_processes() -> None:
    """Raise UsageError if Accelerate counts fewer processes than the process group has ranks."""
    counted = _state().get("num_processes")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if counted is not None and counted < ranks:
        raise UsageError(
            f"Accelerate counts {counted} of the {ranks} ranks of the process group, so that they would train on the "
            'same data. Construct the Accelerator before any PartialState, or pass backend="gloo" to PartialState.'
        )


_KEYS_OF = {
    **{rule.type: rule.marks for rule in RULES.values() if rule.marks},
    "RMSprop": ("centered",),
    "Adafactor": ("scale_parameter", "clip_threshold", "decay_rate", "beta2_decay"),
    "Adadelta": ("rho",),
    "Rprop": ("etas", "step_sizes"),
    "NAdam": ("momentum_decay",),
    "ASGD": ("lambd",),
    "Muon": ("ns_steps",),
}
"""Optimizer → keys of its param_groups that no Adam has. bitsandbytes' Adam has `alpha`."""
_OF_TORCH = {"foreach", "differentiable"}
"""Keys of torch's optimizers. Its Adam has `amsgrad` as well; RAdam and Adamax have no key of their own."""
_KEY = '"zero_force_ds_cpu_optimizer"'


def check_groups(params: Any) -> None:
    """Raise ConfigError for param_groups of an optimizer other than Adam, which DeepSpeedCPUAdam would replace.

    Accelerate constructs it from the groups of any optimizer if the config has `offload_optimizer`.
    """
    groups = params if isinstance(params, (list, tuple)) else ()
    keys = {key for group in groups if isinstance(group, dict) for key in group}
    name = next((name for name, own in _KEYS_OF.items() if keys.intersection(own)), None)
    if name is None and keys >= _OF_TORCH and "amsgrad" not in keys:
        name = "an optimizer of torch other than Adam"
    if name is not None:
        raise ConfigError(
            f"DeepSpeedCPUAdam was given the param_groups of {name}, and would train with Adam in its place. "
            "Accelerate and Trainer construct it for every optimizer if the config has offload_optimizer. "
            f"Set {_KEY}: false in the config, so that {name} itself is used, or choose AdamW (--optim adamw_torch)."
        )


def check_folders(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for states on nvme whose folder is the text "none", the plugin's default for a path."""
    unnamed = [
        name
        for name in ("offload_param", "offload_optimizer")
        if read(settings, f"zero_optimization.{name}.device") == "nvme"
        and read(settings, f"zero_optimization.{name}.nvme_path") == "none"
    ]
    if unnamed:
        keys = " and ".join(f"zero_optimization.{name}.nvme_path" for name in unnamed)
        options = " and ".join(f"--{name}_nvme_path" for name in unnamed)
        variables = " and ".join(f"ACCELERATE_DEEPSPEED_{name.upper()}_NVME_PATH" for name in unnamed)
        arguments = ", ".join(f"{name}_nvme_path=…" for name in unnamed)
        raise ConfigError(
            f'{keys}: "none" is no folder. Accelerate fills it in where it has no path, and `accelerate launch` 1.15 '
            f"ignores {options}. Set {variables} in the environment to a folder on a local drive, pass "
            f"DeepSpeedPlugin({arguments}), or name the folder in a JSON (--deepspeed_config_file). "
            'A folder with this name is "./none".'
        )


def _state() -> dict[str, Any]:
    """Return the attributes of Accelerate's PartialState; empty if it is not loaded or not being built."""
    loaded = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = getattr(getattr(loaded, "PartialState", None), "_shared_state", {})
    return shared
