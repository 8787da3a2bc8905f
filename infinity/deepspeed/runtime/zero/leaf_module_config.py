"""Section `zero_optimization.leaf_module`, which has no effect here: units are fetched when they are used."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from infinity.deepspeed.runtime.config_utils import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{module}.modeling_{module}.{name}SparseMoeBlock"
    for module, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _listed(value: object) -> object:
    """Return one text as a list, and a list without repetitions."""
    if isinstance(value, str):
        return [value]
    return list(dict.fromkeys(value)) if isinstance(value, list) else value


_Names = Annotated[list[str], BeforeValidator(_listed)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Classes, names and suffixes of names of leaf modules, with DeepSpeed's defaults."""

    classes: _Names = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: _Names = Field(default_factory=list)
    name_suffixes: _Names = Field(default_factory=list)
