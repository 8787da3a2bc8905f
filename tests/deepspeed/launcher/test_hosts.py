"""Hostfiles and filters in DeepSpeed's syntax."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinity.deepspeed.launcher.translate import Host, limit_hosts, parse_hostfile, select_hosts
from infinity.errors import ConfigError

HOSTS = parse_hostfile("worker-0 slots=2\nworker-1 slots=4\n", "hosts")


def slots(hosts: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in hosts}


def problems(call: object, *arguments: object) -> tuple[str, ...]:
    assert callable(call)
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    return error.value.problems


def test_a_hostfile_keeps_its_order_and_skips_comments() -> None:
    text = "# workers\n\n  b.example slots=2 max_slots=8\n10.0.0.1\tslots=1  # the spare\n#c slots=9\n"
    assert parse_hostfile(text, "hosts") == (Host("b.example", (0, 1)), Host("10.0.0.1", (0,)))


def test_all_faults_of_a_hostfile_are_named() -> None:
    text = "a slots=2\nb\na slots=1\nc slots=0\nd slots=4x\ne slots=-1\n"
    assert problems(parse_hostfile, text, "hosts") == (
        "hosts, line 2: 'b' does not name a host: write HOST slots=N",
        "hosts, line 3: a occurs twice: remove one of the lines",
        "hosts, line 4: c has no slots: remove the line, or give it at least one",
        "hosts, line 5: 'd slots=4x' does not name a host: write HOST slots=N",
        "hosts, line 6: 'e slots=-1' does not name a host: write HOST slots=N",
    )
    assert problems(parse_hostfile, "# none\n", "hosts") == (
        "hosts has no hosts: write one host per line, such as worker-0 slots=4",
    )


@pytest.mark.parametrize(
    ("include", "exclude", "selected"),
    [
        ("", "", {"worker-0": (0, 1), "worker-1": (0, 1, 2, 3)}),
        ("worker-0@worker-1:0,2", "", {"worker-0": (0, 1), "worker-1": (0, 2)}),
        ("worker-1:2,0,2", "", {"worker-1": (0, 2)}),
        ("worker-1:3@worker-1:1", "", {"worker-1": (1, 3)}),
        ("worker-1@worker-0", "", {"worker-0": (0, 1), "worker-1": (0, 1, 2, 3)}),
        ("", "worker-1:0", {"worker-0": (0, 1), "worker-1": (1, 2, 3)}),
        ("", "worker-0", {"worker-1": (0, 1, 2, 3)}),
        ("", "worker-0:0,1@worker-1:3", {"worker-1": (0, 1, 2)}),
    ],
)
def test_filters_select_slots(include: str, exclude: str, selected: dict[str, tuple[int, ...]]) -> None:
    result = select_hosts(HOSTS, include, exclude)
    assert list(slots(result).items()) == list(selected.items())


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("worker-0", "worker-1", "--include and --exclude cannot be combined"),
        ("worker-2", "", "--include: 'worker-2' is not one of the hosts worker-0, worker-1"),
        ("worker-0@", "", "--include: '' is not one of the hosts worker-0, worker-1"),
        ("worker-0:0-1", "", "--include: worker-0 has the slots 0, 1, not '0-1'"),
        ("worker-0:", "", "--include: worker-0 has the slots 0, 1, not ''"),
        ("", "worker-0:1,2,x", "--exclude: worker-0 has the slots 0, 1, not '2', 'x'"),
        ("worker-0@worker-0:1", "", "worker-0 is listed twice, at least once without slots"),
        ("worker-0:1@worker-0", "", "worker-0 is listed twice, at least once without slots"),
        ("", "worker-0@worker-1", "--exclude worker-0@worker-1 leaves no slot"),
    ],
)
def test_wrong_filters_are_refused(include: str, exclude: str, said: str) -> None:
    assert any(said in problem for problem in problems(select_hosts, HOSTS, include, exclude))


def test_all_faults_of_a_filter_are_named() -> None:
    assert len(problems(select_hosts, HOSTS, "x@worker-0:7@y:1", "")) == 3


@st.composite
def filters(draw: st.DrawFn) -> tuple[tuple[Host, ...], dict[str, set[int]]]:
    """Hosts, and a subset of the slots of some of them."""
    counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    hosts = tuple(Host(f"host-{number}", tuple(range(count))) for number, count in enumerate(counts))
    named = draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    return hosts, {host.name: set(draw(st.lists(st.sampled_from(host.slots), min_size=1))) for host in named}


@given(filters())
def test_include_and_exclude_are_complements(case: tuple[tuple[Host, ...], dict[str, set[int]]]) -> None:
    hosts, named = case
    text = "@".join(f"{name}:{','.join(map(str, numbers))}" for name, numbers in named.items())
    included = slots(select_hosts(hosts, include=text))
    assert included == {name: tuple(sorted(named[name])) for name in sorted(named)}
    if all(set(host.slots) == named.get(host.name) for host in hosts):
        assert "leaves no slot" in problems(select_hosts, hosts, "", text)[0]
        return
    excluded = slots(select_hosts(hosts, exclude=text))
    for host in hosts:
        assert sorted(included.get(host.name, ()) + excluded.get(host.name, ())) == list(host.slots)


def test_counts_take_the_first_hosts_and_slots() -> None:
    assert slots(limit_hosts(HOSTS, 1, None)) == {"worker-0": (0, 1)}
    assert slots(limit_hosts(HOSTS, None, 2)) == {"worker-0": (0, 1), "worker-1": (0, 1)}
    assert limit_hosts(HOSTS, None, None) == HOSTS
    assert slots(limit_hosts(HOSTS[1:], None, 3)) == {"worker-1": (0, 1, 2)}


def test_counts_beyond_the_hosts_are_refused() -> None:
    assert problems(limit_hosts, HOSTS, 3, 0) == (
        "--num_gpus is 0, not a positive number",
        "--num_nodes is 3, but there are 2 hosts (worker-0, worker-1): list more in --hostfile",
    )
    assert problems(limit_hosts, HOSTS, None, 3) == (
        "--num_gpus is 3, but worker-0 has 2: pass at most the GPUs of the smallest host",
    )
    assert problems(limit_hosts, HOSTS, -2, None) == ("--num_nodes is -2, not a positive number",)
