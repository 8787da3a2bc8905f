"""A configuration while it is being translated: nested dicts by dotted names, the draft, and notes for the user.

Resolves "auto" values from arguments and the model, for the keys that Accelerate and transformers' Trainer fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from infinity.inputs import show

ABSENT: Final = object()
"""Returned for a key that is not there."""


def copied(value: Any) -> Any:
    """Return `value` with every mapping in it replaced by a new dict."""
    return {key: copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def leaves(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every key, a section before its keys. Keys that are not text are left out."""
    for key, value in content.items():
        if isinstance(key, str):
            yield prefix + key, value
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{key}.")


def look(content: Mapping[Any, Any], dotted: str) -> Any:
    """Return the value of `dotted`, or ABSENT."""
    value: Any = content
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def put(content: dict[Any, Any], dotted: str, value: object) -> None:
    """Set `dotted` to `value`. A section that is missing or null is made; one that is no section is left alone."""
    *sections, name = dotted.split(".")
    for part in sections:
        if content.get(part) is None:
            content[part] = {}
        content = content[part]
        if not isinstance(content, dict):
            return
    content[name] = value


def drop(content: dict[Any, Any], dotted: str) -> None:
    """Remove `dotted`, if it is there."""
    section, _, name = dotted.rpartition(".")
    holder = look(content, section) if section else content
    if isinstance(holder, dict):
        holder.pop(name, None)


Dialect: TypeAlias = Literal["infinity", "deepspeed"]
"""Defaults of absent keys and the meaning of `Adam`: this library's or DeepSpeed's."""


class Notes(NamedTuple):
    """Keys that a configuration contains and the schema lacks. Each entry is one phrase."""

    mapped: tuple[str, ...] = ()
    """Keys that set others, as "key value → key value"."""
    ignored: tuple[str, ...] = ()
    """Full names of keys without effect."""
    defaults: tuple[str, ...] = ()
    """Full names of keys that are "auto" without a known value."""
    dotted: tuple[str, ...] = ()
    """Full names that are keys of the top level, where neither this library nor DeepSpeed reads them."""
    filled: tuple[tuple[str, Any], ...] = ()
    """(full name, value) of each key that was "auto" and has a value of `Fill`. `line` leaves them out."""

    def line(self) -> str:
        """Return all notes in one line; "" without any."""
        parts = (
            ("mapped", self.mapped),
            ('"auto" without a value, so default', self.defaults),
            ("no effect here (docs/config.md says why)", self.ignored),
            ("ignored, as in DeepSpeed, since full names with dots are not keys of the top level", self.dotted),
        )
        return "; ".join(f"{title}: {', '.join(phrases)}" for title, phrases in parts if phrases)


@dataclass
class Draft:
    """Content with keys of DeepSpeed and of the schema, and notes for the user."""

    content: dict[Any, Any]
    dialect: Dialect
    mapped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    dotted: list[str] = field(default_factory=list)
    filled: list[tuple[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, dotted: str) -> Any:
        """Remove `dotted` and return its value, or ABSENT."""
        value = look(self.content, dotted)
        drop(self.content, dotted)
        return value

    def has(self, dotted: str) -> bool:
        return look(self.content, dotted) is not ABSENT

    def is_true(self, dotted: str) -> bool:
        return look(self.content, dotted) is True

    def default(self, dotted: str, value: object) -> None:
        """Set `dotted` to `value` if it is absent."""
        if not self.has(dotted):
            put(self.content, dotted, value)

    def map(self, source: str, value: object, target: str, result: object, *, places: bool = False) -> None:
        """Set `target` to `result`, because `source` is `value`. A target that is set already wins.

        places: the keys place states, so that another value of `target` is a problem.
        """
        if self.has(target):
            present = look(self.content, target)
            if places and present != result:
                self.problems.append(
                    f"{source}: {_short(value)} sets {target} to {_short(result)}, which is set to {_short(present)}: "
                    "remove one of them"
                )
                return
            self.ignore(source, f"{target} is set and decides")
            return
        put(self.content, target, result)
        self.mapped.append(f"{source} {_short(value)} → {target} {_short(result)}")

    def ignore(self, dotted: str, why: str) -> None:
        """Note that `dotted` has no effect; with `infinity.strict`, that is a problem."""
        if self.is_true("infinity.strict"):
            self.problems.append(f"{dotted}: has no effect here, and infinity.strict is true: {why}; remove it")
        else:
            self.ignored.append(dotted)

    def refuse(self, dotted: str, value: object, why: str) -> None:
        self.problems.append(f"{dotted}: {show(value)} is not supported; {why}")


def _short(value: object) -> str:
    """Return `value` for a note: whole numbers without a fraction, text without quotes."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else show(value)


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Values for keys that are "auto"; None is unknown. Keys with a value of their own keep it."""

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    nvme_path: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    lr: float | None = None
    """Learning rate of the optimizer, and the highest rate of a schedule with a warm-up."""
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_min_lr: float = 0.0
    warmup_num_steps: int | None = None
    total_num_steps: int | None = None
    hidden_size: int | None = None
    """Width of the model; see `hidden_size_of`."""

    def values(self) -> dict[str, object]:
        """Return dotted key → value of everything known."""
        square = None if self.hidden_size is None else int(0.9 * self.hidden_size * self.hidden_size)
        known = {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization.stage": self.stage,
            "zero_optimization.offload_optimizer.device": self.offload_optimizer_device,
            "zero_optimization.offload_optimizer.nvme_path": self.nvme_path,
            "zero_optimization.offload_param.device": self.offload_param_device,
            "zero_optimization.offload_param.nvme_path": self.nvme_path,
            "bf16.enabled": self.bf16,
            "fp16.enabled": self.fp16,
            "optimizer.params.lr": self.lr,
            "optimizer.params.betas": None if self.betas is None else list(self.betas),
            "optimizer.params.eps": self.eps,
            "optimizer.params.weight_decay": self.weight_decay,
            "scheduler.params.warmup_min_lr": self.warmup_min_lr,
            "scheduler.params.warmup_max_lr": self.lr,
            "scheduler.params.warmup_num_steps": self.warmup_num_steps,
            "scheduler.params.total_num_steps": self.total_num_steps,
            "zero_optimization.stage3_prefetch_bucket_size": square,
        }
        return {key: value for key, value in known.items() if value is not None}


def hidden_size_of(model: Any) -> int | None:
    """Return the largest hidden size in `model.config`, as transformers' models have it; None without one."""
    for config in (getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)):
        sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
        whole = [size for size in sizes if isinstance(size, int)]
        if whole:
            return max(whole)
    return None


def resolve_auto(draft: Draft, fill: Fill, keeps: Callable[[str], bool], in_schema: Callable[[str], bool]) -> None:
    """Replace "auto" in the draft by the values of `fill`; remove the keys for which there is none.

    keeps: tells whether "auto" stays, as a value of its own or in an unknown key. in_schema: tells whether a key is one
    of the schema. Notes the keys that are filled, and keys of the schema that are not.
    """
    content, values = draft.content, fill.values()
    for dotted in [name for name, value in leaves(content) if isinstance(value, str) and value == "auto"]:
        if look(content, dotted) is ABSENT or keeps(dotted):
            continue
        if dotted in values:
            put(content, dotted, values[dotted])
            draft.filled.append((dotted, values[dotted]))
            continue
        drop(content, dotted)
        if dotted in _REQUIRED:
            draft.problems.append(
                f'{dotted}: is "auto", which only a trainer such as Hugging Face\'s fills in: set a number'
            )
        elif in_schema(dotted):
            draft.defaults.append(dotted)


_REQUIRED = ("scheduler.params.total_num_steps",)
"""Keys without a default. Batch sizes have none either, but engines for inference need none."""
