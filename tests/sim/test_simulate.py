"""A simulated step adds up, follows the stated speeds, is the same in each run, and leaves nothing behind."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infinity.activations.room import Stored
from infinity.activations.store import ActivationStore
from infinity.engine.platform import Platform
from infinity.errors import ConfigError, ModelError
from infinity.nn.loss import CHUNK_ELEMENTS
from infinity.observe.timeline import LANES
from infinity.plan.placement import State
from infinity.sim import simulate as simulating
from infinity.sim.compute import Compute
from infinity.sim.device import DeviceFacts
from infinity.sim.gpt2 import GPT2, GPT2Config
from infinity.sim.machine import Links
from infinity.sim.platform import SimulatedPlatform
from infinity.sim.ranks import Ranks
from infinity.sim.simulate import Simulation, simulate
from support.configs import engine_config

LINKS = Links(
    nvme_read=2e8,
    nvme_write=1e8,
    nvme_mixed=2e8,
    memory=2e9,
    host_to_device=1e9,
    device_to_host=1e9,
    collective=1e9,
    flops={"float32": 1e11, "bfloat16": 2e11},
    baseline_rss=0,
)
SHAPE = GPT2Config(
    vocab_size=96, seq_length=16, num_layers=4, hidden_size=64, num_attention_heads=4, checkpoint_activations=True
)
TOKENS = torch.zeros(4, 17, dtype=torch.int64)
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]
GPU = DeviceFacts(host_addressable=False, nbytes=1 << 30, bandwidth=1e11)
DEVICES = [DeviceFacts(), GPU]


def run(
    folder: Path,
    links: Links = LINKS,
    device: DeviceFacts | None = None,
    ranks: Ranks | None = None,
    *,
    train_batch: bool = False,
    **options: object,
) -> Simulation:
    config = engine_config(folder=folder, unit_size=60_000, debug=False, **options)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = GPT2(SHAPE)
    return simulate(model, config, links, batch=BATCH, device=device, ranks=ranks, train_batch=train_batch)


def test_reading_its_weight_bounds_a_matmul_of_few_rows(tmp_path: Path) -> None:
    fast, slow = (run(tmp_path, replace(LINKS, weights={"float32": rate})).compute_seconds for rate in (1e15, 1e5))
    assert fast == run(tmp_path).compute_seconds
    with torch.device("meta"):
        matrices = [p.nbytes for p in GPT2(SHAPE).parameters() if p.ndim == 2]
    assert slow > 3 * sum(matrices[2:]) / 1e5  # forward and backward of all linears; the embeddings multiply nothing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [Ranks(), Ranks(4, 2)])
def test_computing_and_waiting_add_up_to_the_step(tmp_path: Path, device: DeviceFacts, ranks: Ranks) -> None:
    found = run(tmp_path, device=device, ranks=ranks, clip=1.0)
    assert found.exposed.keys() <= set(LANES) and min(found.exposed.values()) > 0
    assert found.compute_seconds > 0
    assert found.compute_seconds + sum(found.exposed.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert found.seconds == found.steps[-1].time - found.steps[-2].time


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_run_is_the_same(tmp_path: Path, device: DeviceFacts) -> None:
    first, second = (run(tmp_path, device=device) for _ in range(2))
    assert first.seconds == second.seconds
    assert first.exposed == second.exposed
    assert first.order == second.order


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_bound_by_the_drive_takes_its_bytes(tmp_path: Path, device: DeviceFacts) -> None:
    """Reads and writes overlap at the mixed bandwidth."""
    links = replace(LINKS, nvme_read=1e6, nvme_write=1e6, nvme_mixed=1e6)
    found = run(tmp_path, links, device)
    moved = found.nvme_bytes_read + found.nvme_bytes_written
    assert moved / 1e6 <= found.seconds * 1.001 <= 1.02 * moved / 1e6
    assert found.exposed["nvme_read"] + found.exposed["nvme_write"] > 0.95 * found.seconds


def test_a_step_writes_the_states_once(tmp_path: Path) -> None:
    found = run(tmp_path)
    extents = found.plan.placement.extents
    states = sum(extent.nbytes for (_, state), extent in extents.items() if state is not State.GRAD)
    written = [(name, nbytes) for name, nbytes in found.order["nvme_write"] if "gradient" not in name]
    assert sum(nbytes for _, nbytes in written) == states
    assert found.nvme_bytes_written >= states


@pytest.mark.parametrize("lane, names", [("update", ("memory",)), ("nvme_read", ("nvme_read", "nvme_mixed"))])
def test_a_faster_link_shortens_the_step(tmp_path: Path, lane: str, names: tuple[str, ...]) -> None:
    slow, fast = (replace(LINKS, **dict.fromkeys(names, rate)) for rate in (2e7, 2e9))
    before, after = run(tmp_path, slow, clip=1.0), run(tmp_path, fast, clip=1.0)
    assert after.seconds < before.seconds
    assert after.exposed.get(lane, 0.0) < before.exposed[lane]


def test_products_take_their_operations(tmp_path: Path) -> None:
    """A checkpoint does not recompute a block's last product. Attention skips what its mask hides."""
    found = run(tmp_path, replace(LINKS, flops={"float32": 1e6}))
    tokens, width, length, layers, vocabulary = 64, 64, 16, 4, 96
    block = (24 + 48 + 16) * tokens * width**2 + (4 + 10 + 4) / 2 * tokens * length * width
    flops = layers * block + 6 * tokens * width * vocabulary
    assert found.flops == flops
    assert found.compute_seconds == pytest.approx(flops / 1e6, rel=1e-3)


def test_ranks_of_a_node_share_its_drive(tmp_path: Path) -> None:
    """Four times slower: latencies, which ranks do not share, are left out."""
    links = replace(LINKS, nvme_read=1e6, nvme_write=1e6, nvme_mixed=1e6, wakeup_latency=0, unit_overhead=0)
    alone, shared = run(tmp_path, links, ranks=Ranks(4, 1)), run(tmp_path, links, ranks=Ranks(4, 4))
    assert shared.nvme_bytes_read == alone.nvme_bytes_read
    assert shared.seconds == pytest.approx(4 * alone.seconds, rel=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_every_rank_gathers_whole_units_and_reduces_their_gradients(tmp_path: Path, device: DeviceFacts) -> None:
    found = run(tmp_path, device=device, ranks=Ranks(4, 2))
    model = sum(layout.nbytes for layout in found.plan.units)
    assert found.moved["reduce"] == model
    assert model <= found.moved["gather"] <= 3 * model


def test_activations_of_checkpoints_are_smaller() -> None:
    kept = {}
    for checkpoints in (False, True):
        with torch.device("meta"):
            model = GPT2(replace(SHAPE, checkpoint_activations=checkpoints))
        kept[checkpoints] = simulate(model, engine_config("cpu", "cpu", debug=False), LINKS, batch=BATCH)
    tokens = 4 * 16
    inputs = SHAPE.num_layers * tokens * SHAPE.hidden_size * 4
    assert inputs < kept[True].activation_bytes < kept[False].activation_bytes / 2
    assert kept[True].activation_bytes < kept[True].working_bytes


@pytest.mark.parametrize(("device", "tier"), [(DEVICES[0], "nvme"), (GPU, "nvme"), (GPU, "host")])
def test_activations_in_another_tier_grow_with_depth_and_those_in_memory_do_not(
    tmp_path: Path, device: DeviceFacts, tier: str
) -> None:
    section = {"device": "cpu" if tier == "host" else tier, "min_bytes": 512, "memory_bytes": 65_536}
    seen = []
    for layers in (4, 8):
        with torch.device("meta"):
            model = GPT2(replace(SHAPE, num_layers=layers, checkpoint_activations=False))
        config = engine_config(folder=tmp_path, debug=False, activations=section)
        seen.append(simulate(model, config, LINKS, batch=BATCH, device=device))
    shallow, deep = seen
    saved = 8 * 4 * 16 * SHAPE.hidden_size * 4
    """Bytes of 8 tensors as large as a block's input."""
    assert deep.working_bytes <= shallow.working_bytes + saved // 8
    assert deep.activations.keys() == {tier}
    assert deep.activations[tier] - shallow.activations[tier] > 4 * saved
    assert deep.activation_bytes_read > 0 < deep.activation_bytes_written


def test_activations_that_came_back_take_memory_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computes: list[Compute] = []
    came_back = 0
    use = ActivationStore.use

    class Seen(Compute):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            computes.append(self)

    def counted(store: ActivationStore, stored: Stored, *, in_memory: bool) -> None:
        nonlocal came_back
        others = computes[0].bytes.live - store._resident_bytes()  # the first one is the model's
        use(store, stored, in_memory=in_memory)
        came_back += not in_memory
        assert computes[0].bytes.live - store._resident_bytes() == others

    monkeypatch.setattr(simulating, "Compute", Seen)
    monkeypatch.setattr(ActivationStore, "use", counted)
    run(tmp_path, activations={"device": "nvme", "min_bytes": 1024, "memory_bytes": 32_768})
    assert came_back > 10


def test_a_drive_serves_states_and_activations_together(tmp_path: Path) -> None:
    links = replace(LINKS, nvme_read=1e6, nvme_write=1e6, nvme_mixed=1e6)
    section = {"device": "nvme", "min_bytes": 512, "memory_bytes": 65_536}
    found = run(tmp_path, links, activations=section)
    states = found.nvme_bytes_read + found.nvme_bytes_written
    moved = found.activation_bytes_read + found.activation_bytes_written
    assert states == sum(found.moved[lane] for lane in ("nvme_read", "nvme_write"))
    assert found.exposed["activations"] > 0.9 * moved / 1e6 > 0
    assert (states + moved) / 1e6 <= found.seconds * 1.001


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_run_with_activations_on_nvme_is_the_same(tmp_path: Path, device: DeviceFacts) -> None:
    section = {"device": "nvme", "min_bytes": 512, "memory_bytes": 65_536}
    first, second = (run(tmp_path, device=device, activations=section) for _ in range(2))
    assert first.seconds == second.seconds
    assert first.exposed == second.exposed
    assert first.order == second.order
    assert "activations" in first.order
    assert_no_threads()


class Dropping(nn.Module):
    """Blocks with dropout of their outputs or of attention, which draws random numbers."""

    def __init__(self, of_output: float, of_attention: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Dropout(of_output)) for _ in range(8))
        self.of_attention = of_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            heads = block(x).view(1, 4, 4, 32)
            x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.of_attention).reshape(4, 128)
        return x.sum()


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_train_batch_of_a_model_that_draws_random_numbers_is_an_error(
    tmp_path: Path, rates: tuple[float, float]
) -> None:
    """So it is in the engine. The generators of this process stay as they are."""
    before = torch.get_rng_state()
    found = []
    for train_batch in (False, True):
        with torch.device("meta"):
            model = Dropping(*rates)
        config = engine_config(folder=tmp_path, unit_size=60_000, prefetch_bytes=1, accumulation=2, debug=train_batch)
        with pytest.raises(ModelError, match="random numbers") if max(rates) and train_batch else nullcontext():
            found.append(simulate(model, config, LINKS, batch=(torch.zeros(4, 128),), train_batch=train_batch))
    if not max(rates):
        loop, whole = found
        assert loop.ordinary == whole.ordinary == "" and whole.nvme_bytes_read < loop.nvme_bytes_read
    assert torch.equal(torch.get_rng_state(), before)
    assert_no_threads()


@pytest.mark.parametrize("device, ranks", [(DEVICES[0], Ranks()), (GPU, Ranks(4, 2))])
def test_train_batch_keeps_the_activations_of_all_micro_batches(
    tmp_path: Path, device: DeviceFacts, ranks: Ranks
) -> None:
    options = {"accumulation": 3, "prefetch_bytes": 60_000, "device": device, "ranks": ranks}
    loop, whole = (run(tmp_path, train_batch=each, **options) for each in (False, True))
    assert whole.ordinary == ""
    assert 2.5 * loop.activation_bytes < whole.activation_bytes < 3.5 * loop.activation_bytes
    assert loop.working_bytes + loop.activation_bytes < whole.working_bytes


def test_a_loss_on_the_host_takes_the_memory_of_its_small_chunks(tmp_path: Path) -> None:
    """Other devices compute larger chunks at a time."""
    shape = GPT2Config(vocab_size=16_384, seq_length=64, num_layers=1, hidden_size=16, num_attention_heads=2)
    batch = (torch.zeros(16, 64, dtype=torch.int64),) * 2
    working = []
    for device in DEVICES:
        with torch.device("meta"):
            model = GPT2(shape)
        config = engine_config(folder=tmp_path, debug=False, bf16=True)
        working.append(simulate(model, config, LINKS, batch=batch, device=device).working_bytes)
    logits = 16 * 64 * 16_384
    assert logits == 4 * CHUNK_ELEMENTS
    assert working[1] - working[0] > 4 * logits  # bytes of the fp32 copy that it never makes whole


def test_a_budget_of_a_node_is_divided_over_its_simulated_ranks(tmp_path: Path) -> None:
    budget = 1 << 20
    for memory in ({"host": budget}, {"host": budget, "nvme": "auto"}):
        found = run(tmp_path, ranks=Ranks(4, 2), memory=memory)
        assert found.plan.budget.host == budget // 2


def test_a_trace_has_the_last_step_in_its_lanes(tmp_path: Path) -> None:
    found = run(tmp_path)
    events = found.chrome_trace()["traceEvents"]
    assert list(dict.fromkeys(event["args"]["name"] for event in events if event["name"] == "thread_name")) == [*LANES]
    work = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in work) >= 0
    assert max(event["ts"] + event["dur"] for event in work) <= found.seconds * 1e6 * (1 + 1e-9)


def test_states_on_a_drive_without_bandwidth_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lack nvme_read or nvme_write: measure them with infinity bench-links"):
        run(tmp_path, replace(LINKS, nvme_read=None, nvme_write=None, nvme_mixed=None))
    assert_no_threads()


def test_ranks_and_devices_without_bandwidth_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no collective, which 4 ranks need: .* under torchrun"):
        run(tmp_path, replace(LINKS, collective=None), ranks=Ranks(4, 2))
    with pytest.raises(ConfigError, match=r"lack host_to_device or device_to_host"):
        run(tmp_path, replace(LINKS, device_to_host=None), GPU)
    assert_no_threads()


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        raise ValueError("as a model may")


@pytest.mark.parametrize("activations", [{}, {"device": "nvme", "min_bytes": 1, "memory_bytes": 1}])
def test_an_error_of_the_model_ends_all_threads(tmp_path: Path, activations: dict[str, object]) -> None:
    with torch.device("meta"):
        model = Raising()
    with pytest.raises(ValueError, match="as a model may"):
        config = engine_config(folder=tmp_path, activations=activations)
        simulate(model, config, LINKS, batch=(torch.zeros(2, 64, requires_grad=True) * 2,))
    assert_no_threads()


def test_real_engines_and_attention_are_as_before(tmp_path: Path) -> None:
    run(tmp_path)
    assert_no_threads()
    query = torch.zeros(1, 1, 2, 4, device="meta", requires_grad=True)
    graph = F.scaled_dot_product_attention(query, query, query)
    assert graph.grad_fn is not None and "Flash" not in graph.grad_fn.name()


def assert_no_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("infinity-"):
            threading.Thread.join(thread, 5)  # in real time: a simulated thread's own join waits in virtual time
            assert not thread.is_alive()


def test_a_simulated_platform_makes_every_part_itself() -> None:
    """A part that it inherited would open files, or exchange bytes, of this machine."""
    made = {name for name in vars(Platform) if not name.startswith("_")} - {"kernels"}
    assert made <= vars(SimulatedPlatform).keys()
