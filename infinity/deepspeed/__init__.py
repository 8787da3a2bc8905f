"""DeepSpeed's interface to Infinity's engine: `import infinity.deepspeed as deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, training_data=data)
    loss = engine(batch); engine.backward(loss); engine.step()

`__version__` begins with the version of DeepSpeed whose interface this is; `__infinity_version__` is Infinity's own.
Submodules are imported when they are used; those of DeepSpeed that have no file are in `tree`. docs/deepspeed.md lists
the differences.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.19.8+infinity"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
version = __version__
__git_hash__ = __git_branch__ = None
HAS_TRITON = False

_ROOT = __name__
_HOMES = {
    "DeepSpeedConfig": "config.DeepSpeedConfig",
    "DeepSpeedConfigError": "config.DeepSpeedConfigError",
    "DeepSpeedEngine": "engine.DeepSpeedEngine",
    "PipelineEngine": "runtime.pipe.engine.PipelineEngine",
    "PipelineModule": "pipe.PipelineModule",
    "DeepSpeedOptimizer": "runtime.base_optimizer.DeepSpeedOptimizer",
    "RepeatingLoader": "helpers.RepeatingLoader",
    "add_config_arguments": "initialization.add_config_arguments",
    "get_accelerator": "accelerator.get_accelerator",
    "init_distributed": "comm.init_distributed",
    "initialize": "initialization.initialize",
    "init_inference": "initialization.init_inference",
    "log_dist": "helpers.log_dist",
    "logger": "helpers.logger",
    "tp_model_init": "initialization.tp_model_init",
}
"""Name → its module and name below this package."""
_SAME = (
    "accelerator",
    "checkpoint",
    "comm",
    "elasticity",
    "git_version_info",
    "module_inject",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
)
_MODULES = {
    **{name: name for name in _SAME},
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "zero": "runtime.zero",
}
"""Name of a module → its path below this package."""

__all__ = [*_HOMES, *_MODULES]


_OF_THE_FINDER = f"{_ROOT}.mirror", f"{_ROOT}.tree"


class _Finder:
    """Finds DeepSpeed's modules that have no file here. Part of `sys.meta_path`."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{_ROOT}.") or fullname in _OF_THE_FINDER:
            return None
        # Here, since `import infinity.deepspeed` imports no submodule.
        return import_module(f"{_ROOT}.mirror").find_spec(fullname.removeprefix(f"{_ROOT}."))


# Before the finders of files, which take a folder that an earlier version left behind for a package without files.
sys.meta_path.insert(0, _Finder)


def __getattr__(name: str) -> Any:
    if name == "__infinity_version__":
        return import_module(_ROOT.partition(".")[0]).__version__
    if name in _MODULES:
        return import_module(f"{_ROOT}.{_MODULES[name]}")
    if name not in _HOMES:
        alternative = import_module(f"{_ROOT}.tree").alternative(name)
        raise AttributeError(alternative or f"module {_ROOT!r} has no attribute {name!r}")
    home, _, attribute = _HOMES[name].rpartition(".")
    return getattr(import_module(f"{_ROOT}.{home}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
