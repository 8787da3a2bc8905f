"""A case: a model, a loop and two placements as plain data, drawn from a seed or by hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from fuzz.draw import Draw, HypothesisDraw, SeededDraw, flag
from fuzz.registry import LEAVES, WRAPPERS
from fuzz.seldom import ONCE_IN, other_event, other_part


@dataclass(frozen=True)
class Node:
    """A part of the model: (batch, length, width) → the same. `kind`/`variant`: see `fuzz.registry`."""

    kind: str
    variant: str
    children: tuple[Node, ...] = ()
    frozen: bool = False
    """True if its own parameters start frozen."""


@dataclass(frozen=True)
class Event:
    """`kind` happens in step `step`, at `place` of it; `target` chooses a parameter or part where it needs one."""

    step: int
    place: str
    kind: str
    target: int = 0


@dataclass(frozen=True)
class Loop:
    """How the model is trained; see `fuzz.loops`."""

    steps: int = 3
    accumulation: int = 1
    call: str = "engine"
    backward: str = "engine"
    penalty: str = "none"
    kept: str = "parameters"
    """Kind of tensors that the loop keeps of the model, for its penalty and edits; see `fuzz.trainers`."""
    optimizer: str = "AdamW"
    groups: int = 1
    schedule: str = "none"
    clip: float = 0.0
    thread: str = "main"
    autocast: bool = False
    dtype: str = "fp32"
    """dtype of the parameters; 16-bit ones have an fp32 master."""
    unsynced: bool = False
    """True if all micro-batches of a step but the last run in `no_sync`."""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Placement of states and schedule of transfers: config keys of the engine, and late devices of the tests."""

    param: str = "nvme"
    optim: str = "nvme"
    stage: int = 3
    update: str = "auto"
    prefetch: int | str = 0
    unit_size: int = 4096
    cache: int = 0
    late: str = "no"
    debug: bool = True
    host: float | None = None
    """Share of the states on nvme for which `infinity.memory.host` has room beside all buffers; None: no budget. What
    resumes from a checkpoint has room for the others (`fuzz.trainers`)."""
    host_params: float | None = None
    """Share of the parameters on nvme that `infinity.memory.host_params` keeps in memory; None: not set."""
    device: float | None = None
    """Share of the states outside of the device for which half of `infinity.memory.device` has room beside buffers;
    None: no budget. Has an effect on a late device."""


@dataclass(frozen=True)
class Case:
    """A model, a loop and two placements. seed: seeds initial values and batches."""

    nodes: tuple[Node, ...]
    loop: Loop = field(default_factory=Loop)
    settings: tuple[Setting, Setting] = (Setting(), Setting(param="none", optim="none"))
    head: str = "plain"
    seed: int = 0


PLACES = ("before", "between", "after")
EVENTS: dict[str, tuple[str, ...]] = {
    "evaluate": PLACES,
    "evaluate in inference mode": PLACES,
    "evaluate with gradients": ("before", "after"),
    "read": PLACES,
    "read kept": PLACES,
    "read state_dict": PLACES,
    "read master": PLACES,
    "generate": PLACES,
    "edit data": ("before", "after"),
    "edit numpy": ("before", "after"),
    "edit no_grad": ("before", "after", "between"),
    "edit kept": ("before", "after", "between"),
    "edit kept view": ("before", "after"),
    "assign data": ("before", "after"),
    "apply": ("before", "after"),
    "vector": ("before", "after"),
    "freeze": ("before", "after"),
    "unfreeze": ("before", "after"),
    "freeze for a backward": ("before",),
    "raise in forward": ("before",),
    "raise in pre-hook": ("before",),
    "raise in backward": ("before",),
    "raise in evaluation": ("before", "after"),
    "drop": ("between",),
    "average": ("after",),
    "register hook": ("before",),
    "train and eval": ("before",),
    "functional": ("before", "after"),
    "copy": ("after",),
    "grad by hand": ("before", "after"),
    "set lr": ("after",),
    "save and load": ("after",),
    "gathered": ("before", "after"),
    "by hand": ("between",),
}
CALLS = ("engine", "engine", "engine", "engine", "module", "parts", "functional", "checkpointed", "two forwards")
BACKWARDS = ("engine", "engine", "engine", "tensor", "twice", "twice uncounted", "two losses", "autograd")
PENALTIES = (
    ("none",) * 6
    + ("attribute l2", "attribute view", "kept l2", "kept norm", "kept pair", "kept detached")
    + ("input gradient", "weight gradient", "kept gradient", "sharpness", "maml")
)
KEPT = ("parameters", "parameters", "views", "detached", "named", "from first forward")
KEPT_BEFORE = ("views before", "detached before")
OPTIMIZERS = ("AdamW", "AdamW", "Adam", "SGD", "SGD nesterov", "Adagrad", "Lion")
SCHEDULES = ("none", "none", "lambda", "by hand", "config")
DTYPES = ("fp32",) * 14 + ("bf16", "bf16", "fp16")
THREADS = ("main", "main", "main", "main", "one", "each step", "evaluation")


def draw_node(draw: Draw, depth: int) -> Node:
    wrapped = depth > 0 and draw.integer(0, 9) >= 6
    kinds = WRAPPERS if wrapped else LEAVES
    kind = draw.choice(list(kinds))
    kind, variant = other_part(draw, kind, draw.choice(kinds[kind]), kinds[kind])
    children: tuple[Node, ...] = ()
    if wrapped:
        children = tuple(draw_node(draw, depth - 1) for _ in range(draw.choice((1, 1, 2, 3))))
    return Node(kind, variant, children, frozen=flag(draw, 6))


def draw_loop(draw: Draw) -> Loop:
    steps = draw.choice((3, 3, 4, 5))
    events = []
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        kind = other_event(draw, draw.choice(list(EVENTS)))
        events.append(Event(draw.integer(0, steps - 1), draw.choice(EVENTS[kind]), kind, draw.integer(0, 40)))
    return Loop(
        steps=steps,
        accumulation=draw.choice((1, 1, 2, 3)),
        call=draw.choice(CALLS),
        backward=draw.choice(BACKWARDS),
        penalty=draw.choice(PENALTIES),
        kept=draw.choice(KEPT_BEFORE if flag(draw, 120) else KEPT),
        optimizer=draw.choice(OPTIMIZERS),
        groups=draw.choice((1, 1, 2)),
        schedule=draw.choice(SCHEDULES),
        clip=draw.choice((0.0, 0.0, 0.3, 30.0)),
        thread=draw.choice(THREADS),
        autocast=flag(draw, 12),
        dtype=draw.choice(DTYPES),
        unsynced=flag(draw, 4),
        events=tuple(events),
    )


def draw_setting(draw: Draw, param: str | None = None) -> Setting:
    stage = 3 if param else draw.choice((3, 3, 3, 3, 0, 1, 2))
    placed = param or (draw.choice(("none", "cpu", "nvme")) if stage == 3 else "none")
    return Setting(
        param=placed,
        optim=param or draw.choice(("none", "cpu", "nvme")),
        stage=stage,
        update=draw.choice(("auto", "auto", "next_forward", "after_backward", "during_backward")),
        prefetch=draw.choice((0, 0, 3000, "auto")),
        unit_size=draw.choice((4096, 1024, 64)) if param else draw.choice((4096, 100_000, 1024, 64)),
        cache=draw.choice((0, 0, 0, 20_000)),
        late="no" if param else draw.choice(("no", "no", "device", "disk", "both")),
        debug=not flag(draw, 4),
    )


def draw_case(draw: Draw) -> Case:
    nodes = tuple(draw_node(draw, draw.choice((1, 2, 2, 3))) for _ in range(draw.integer(1, 4)))
    nodes = tuple(_sometimes(draw, node) if flag(draw, 5) else node for node in nodes)
    settings = (draw_setting(draw, "nvme"), draw_setting(draw))
    loop = _without_what_a_load_changes(draw_loop(draw))
    if loop.dtype != "fp32":
        nodes = tuple(_in_16_bits(node) for node in nodes)
        if loop.optimizer == "Lion" and any(node.kind == "attention" for node in each_node(nodes)):
            loop = replace(loop, optimizer="SGD")  # the gradient of a key's bias is zero but for rounding, sign and all
    if loop.clip or loop.dtype == "fp16":  # the norm of all gradients is wanted before the first update
        settings = tuple(_without_live_updates(s) for s in settings)  # type: ignore[assignment]
    elif _looks_before_the_step(loop) and not flag(draw, ONCE_IN):
        settings = tuple(replace(s, update="next_forward") for s in settings)  # type: ignore[assignment]
    head = draw.choice(("plain", "plain", "none", "tied", "shared with first"))
    by_grad = loop.penalty in _BY_GRAD or any(event.kind == "grad by hand" for event in loop.events)
    if by_grad and loop.call == "checkpointed":
        loop = replace(loop, call="engine")
    if by_grad or loop.backward.startswith("tw"):  # torch refuses the second pass through a selective checkpoint
        nodes = tuple(_checkpointed_otherwise(node, reentrant=not by_grad) for node in nodes)
    if any(node.kind == "sometimes" for node in each_node(nodes)):
        loop = replace(loop, steps=loop.steps + draw.integer(0, 3))  # enough for a step that departs from known ones
    if loop.penalty == "maml":  # a checkpoint's recomputation uses the parameters, not their replacements
        nodes = tuple(_unchecked(node) for node in nodes)
    if any("functional" in node.variant for node in each_node(nodes)):  # what it leaves in a module is not saved
        loop = replace(loop, events=tuple(event for event in loop.events if event.kind != "save and load"))
    if loop.penalty == "sharpness" and loop.dtype != "fp32":  # undoing an edit may round the master
        loop = replace(loop, penalty="none")
    seed = draw.integer(0, 999)
    settings = tuple(_with_budget(draw, setting) for setting in settings)  # type: ignore[assignment]
    return Case(nodes, loop, settings, head, seed)


def each_node(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes of the model."""
    for node in nodes:
        yield node
        yield from each_node(node.children)


def _sometimes(draw: Draw, node: Node) -> Node:
    """Let some steps run or train `node` in another way."""
    return Node("sometimes", draw.choice(WRAPPERS["sometimes"]), (node,))


def _without_what_a_load_changes(loop: Loop) -> Loop:
    """Drop events that a checkpoint does not save, such as hooks and `requires_grad`, if the loop loads one."""
    if all(event.kind != "save and load" for event in loop.events):
        return loop
    changes = ("freeze", "unfreeze", "register hook")
    kept = tuple(event for event in loop.events if event.kind not in changes)
    return replace(loop, events=kept, schedule="none" if loop.schedule == "lambda" else loop.schedule)


def _in_16_bits(node: Node) -> Node:
    """Replace variants that plain PyTorch supports in fp32 only."""
    children = tuple(_in_16_bits(child) for child in node.children)
    if node.kind == "complex":
        return Node("linear", "gelu")
    if (node.kind, node.variant) in _FP32_ONLY:
        return replace(node, children=children, variant={**LEAVES, **WRAPPERS}[node.kind][1])
    return replace(node, children=children)


_FP32_ONLY = {
    ("edited before use", "numpy"),
    ("edited after use", "numpy"),
    ("edited by hook", "numpy"),
    ("codebook", "moving average"),
    ("codebook", "restart"),
    ("shapes", "fp64 frozen"),
    ("kept view", "numpy"),
    ("saved hooks", "numpy"),
    ("functional", "deepcopy in init"),
    ("mask", "comparison only"),
    ("normed", "orthogonal"),
    ("mode", "autocast"),
}


_BY_GRAD = ("input gradient", "weight gradient", "kept gradient", "sharpness", "maml")
"""Penalties that call `torch.autograd.grad`, which torch refuses through reentrant checkpoints."""


def _checkpointed_otherwise(node: Node, *, reentrant: bool) -> Node:
    children = tuple(_checkpointed_otherwise(child, reentrant=reentrant) for child in node.children)
    refused = ("selective",) if reentrant else ("selective", "reentrant", "reentrant each", "late reentrant", "both")
    changed = node.kind == "checkpoint" and node.variant in refused
    if node.kind == "attention" and not reentrant:  # its fused kernel has no second derivative
        return replace(node, variant="mha")
    if node.kind == "sometimes" and node.variant == "reentrant" and not reentrant:
        return replace(node, variant="checkpointed", children=children)
    return replace(node, children=children, variant="nested" if changed else node.variant)


def _unchecked(node: Node) -> Node:
    children = tuple(_unchecked(child) for child in node.children)
    if node.kind == "checkpoint":
        return replace(node, kind="nest", variant="own after", children=children)
    if node.kind == "sometimes" and node.variant in ("reentrant", "checkpointed"):
        return replace(node, variant="twice", children=children)
    return replace(node, children=children)


def _looks_before_the_step(loop: Loop) -> bool:
    """Return True if the loop uses parameters between backward and step, when updates in backward have changed them."""
    return loop.backward == "twice uncounted" or any(event.place == "between" for event in loop.events)


def _with_budget(draw: Draw, setting: Setting) -> Setting:
    """Let memory hold some of the states on nvme. Draws alike for all settings."""
    host = draw.choice((None, None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0))
    params = draw.choice((None, None, None, 0.0, 0.3, 0.6))
    setting = replace(setting, device=draw.choice((None, None, 0.1, 0.4, 0.8, 1.0)))
    return setting if "nvme" not in (setting.param, setting.optim) else replace(setting, host=host, host_params=params)


def _without_live_updates(setting: Setting) -> Setting:
    return replace(setting, update="auto") if setting.update == "during_backward" else setting


def case_of(seed: int) -> Case:
    """Return the case of a seed, the same on every machine."""
    return draw_case(SeededDraw(seed))


@st.composite
def cases(draw: Any) -> Case:
    """Cases whose choices hypothesis makes."""
    return draw_case(HypothesisDraw(draw))


def in_words(value: Any, indent: str = "") -> str:
    """Return the Python expression that constructs a case, without arguments equal to their defaults."""
    if isinstance(value, tuple):
        inner = "".join(f"{indent}    {in_words(each, indent + '    ')},\n" for each in value)
        return f"(\n{inner}{indent})" if value else "()"
    if not isinstance(value, (Case, Node, Loop, Setting, Event)):
        return repr(value)
    given = [
        f"{each.name}={in_words(getattr(value, each.name), indent)}"
        for each in fields(value)
        if each.default is MISSING or getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"
