"""`DeepSpeedConfigModel`, the base of DeepSpeed's config sections."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from infinity.deepspeed.checks import FailedConfigCheck
from infinity.observe.log import logger


class DeepSpeedConfigModel(BaseModel):
    """A section whose fields may be assigned, with DeepSpeed's deprecated fields.

    Values "auto" count as absent, unless `strict` is True. A field with `json_schema_extra` {"deprecated": True,
    "new_param": "b.c"} moves its value to the field `b.c`, through the function `new_param_fn` if there is one.
    `set_new_param` False: it only logs a warning. Raises pydantic's ValidationError, and FailedConfigCheck if both
    fields are set.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{name: value for name, value in data.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._move(name, extra)

    def _move(self, name: str, extra: dict[str, Any]) -> None:
        target = extra.get("new_param", "")
        logger.warning("%s is deprecated%s", name, f": use {target}" if target else "")
        if not target or not extra.get("set_new_param", True):
            return
        convert = extra.get("new_param_fn", lambda value: value)
        *sections, last = target.split(".")
        section = reduce(getattr, sections, self)
        if last in section.model_fields_set:
            raise FailedConfigCheck(f"{name} is deprecated, and {target} is set, too: remove {name}")
        setattr(section, last, convert(getattr(self, name)))
