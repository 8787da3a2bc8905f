"""Flags of DeepSpeed's launcher as commands, of torchrun or of a single rank, on machines with and without GPUs."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from torch.distributed.elastic.utils import macros
from torch.distributed.run import config_from_args, parse_args

from infinity.deepspeed.launcher.flags import Command, Kind, Program
from infinity.deepspeed.launcher.translate import Host, Launch, Machine, Request, translate
from infinity.errors import ConfigError

CPU = Machine(
    gpus=0,
    cores=8,
    names=frozenset({"localhost", "here"}),
    environ={"OMP_NUM_THREADS": "4"},
    python="python",
    port=1234,
)
FOUR = replace(CPU, gpus=4)
TRAIN = Program("train.py", ("--deepspeed_config", "x.json"))
SEEN = "-m infinity.deepspeed train.py '--local_rank=${local_rank}' --deepspeed_config x.json"
LOCAL = "torchrun --standalone --local-addr=127.0.0.1"
ALONE = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=1"
STARTED = "python -u -m infinity.deepspeed train.py --local_rank=0 --deepspeed_config x.json"
TWO = (Host("a", (0, 1)), Host("b", (0, 1, 2, 3)))


def shown(request: Request, machine: Machine = FOUR) -> list[str]:
    return [command.shown() for command in translate(request, machine).commands]


def refused(request: Request, machine: Machine = FOUR) -> str:
    with pytest.raises(ConfigError) as error:
        translate(request, machine)
    return str(error.value)


def test_every_gpu_gets_a_rank() -> None:
    assert shown(Request(TRAIN)) == [f"{LOCAL} --nproc-per-node=4 {SEEN}"]


@pytest.mark.parametrize(
    ("request_", "devices", "ranks"),
    [
        (Request(TRAIN, num_gpus=2), "0,1", 2),
        (Request(TRAIN, include="localhost:3,1"), "1,3", 2),
        (Request(TRAIN, exclude="localhost:0"), "1,2,3", 3),
    ],
)
def test_chosen_gpus_are_the_only_visible_ones(request_: Request, devices: str, ranks: int) -> None:
    assert shown(request_) == [f"CUDA_VISIBLE_DEVICES={devices} {LOCAL} --nproc-per-node={ranks} {SEEN}"]


def test_visible_devices_are_respected() -> None:
    machine = replace(CPU, gpus=2, environ={**CPU.environ, "CUDA_VISIBLE_DEVICES": "GPU-5,7"})
    assert shown(Request(TRAIN), machine) == [f"{LOCAL} --nproc-per-node=2 {SEEN}"]
    launch = translate(Request(TRAIN, num_gpus=1), machine)
    assert launch.commands[0].environment["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert launch.notes == ("--num_gpus counts the GPUs of CUDA_VISIBLE_DEVICES=GPU-5,7",)
    assert "both select GPUs" in refused(Request(TRAIN, include="localhost:1"), machine)


def test_ranks_are_bound_by_an_argument_of_their_program() -> None:
    """So that a printed command binds them on its host."""
    for bind in ("--bind_cores_to_rank", "--bind_cores_to_rank=0,2-5"):
        bound = SEEN.replace("infinity.deepspeed", f"infinity.deepspeed {bind}")
        request = Request(replace(TRAIN, bind=(bind,)))
        assert shown(request) == [f"{LOCAL} --nproc-per-node=4 {bound}"]
        assert all(bound in command for command in shown(replace(request, hosts=TWO)))


def test_without_gpus_ranks_run_on_the_cpu() -> None:
    launch = translate(Request(TRAIN), CPU)
    assert launch.commands[0].program == "python" and launch.notes == ("no GPU: starting 1 rank on the CPU",)
    launch = translate(Request(TRAIN, num_gpus=3), CPU)
    assert launch.commands[0].arguments[2] == "--nproc-per-node=3" and "3 ranks on the CPU" in launch.notes[0]
    assert "selects GPUs, but there is none" in refused(Request(TRAIN, include="localhost:0"), CPU)


@pytest.mark.parametrize(("ranks", "threads"), [(1, None), (2, "4"), (3, "2"), (99, "1")])
def test_ranks_share_the_cores(ranks: int, threads: str | None) -> None:
    launch = translate(Request(TRAIN, num_gpus=ranks), replace(CPU, environ={}))
    assert launch.commands[0].environment.get("OMP_NUM_THREADS") == threads


def test_address_and_port_are_passed_on() -> None:
    assert shown(Request(TRAIN, master_port=7, num_gpus=2), CPU) == [
        f"torchrun --master-addr=127.0.0.1 --master-port=7 --nproc-per-node=2 {SEEN}"
    ]
    assert "--master-addr=10.0.0.1 --master-port=29500" in shown(Request(TRAIN, master_addr="10.0.0.1"))[0]


@pytest.mark.parametrize(
    ("request_", "machine", "devices", "address"),
    [
        (Request(TRAIN), CPU, "", "MASTER_ADDR=127.0.0.1 MASTER_PORT=1234"),
        (Request(TRAIN), replace(CPU, gpus=1), "", "MASTER_ADDR=127.0.0.1 MASTER_PORT=1234"),
        (Request(TRAIN, num_gpus=1, master_port=7), FOUR, "0", "MASTER_ADDR=127.0.0.1 MASTER_PORT=7"),
        (Request(TRAIN, include="localhost:3"), FOUR, "3", "MASTER_ADDR=127.0.0.1 MASTER_PORT=1234"),
        (Request(TRAIN, TWO, include="b:2", master_addr="m"), FOUR, "2", "MASTER_ADDR=m MASTER_PORT=1234"),
    ],
)
def test_a_single_rank_is_started_without_torchrun(
    request_: Request, machine: Machine, devices: str, address: str
) -> None:
    visible = f"CUDA_VISIBLE_DEVICES={devices} " if devices else ""
    assert shown(request_, machine) == [f"{visible}{ALONE} {address} {STARTED}"]


def test_a_single_rank_with_a_log_or_on_another_host_needs_torchrun() -> None:
    (command,) = translate(Request(TRAIN, logs="logs"), CPU).commands
    assert (command.program, command.arguments[2]) == ("torchrun", "--nproc-per-node=1")
    (command,) = translate(Request(TRAIN, (Host("a", (0,)),), force_multi=True), FOUR).commands
    assert (command.program, command.host) == ("torchrun", "a")
    of_two = Request(TRAIN, (Host("a", (0,)), Host("b", (0,))), node_rank=1)
    assert translate(of_two, FOUR).commands[0].program == "torchrun"


def test_a_single_rank_inherits_nothing_of_an_agent() -> None:
    """With TORCHELASTIC_USE_AGENT_STORE it would wait for the store of a torchrun that does not know it."""
    machine = replace(CPU, environ={"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1", "HOME": "/"})
    (command,) = translate(Request(TRAIN), machine).commands
    assert command.unset == ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
    assert command.shown().startswith(f"env -u TORCHELASTIC_RUN_ID -u TORCHELASTIC_USE_AGENT_STORE {ALONE} MASTER_ADDR")


@pytest.mark.parametrize(
    ("program", "started"),
    [
        (Program("work", ("--x",), Kind.MODULE), "-m work --local_rank=0 --x"),
        (Program("./run.sh", (), Kind.EXECUTABLE, bind=("--bind=1",)), "--bind=1 --no_python ./run.sh --local_rank=0"),
        (Program("a$.py", ("${local_rank}", "$$", ""), local_rank=False), "'a$.py' '${local_rank}' '$$' ''"),
    ],
)
def test_a_single_rank_gets_its_arguments_unchanged(program: Program, started: str) -> None:
    assert shown(Request(program), CPU)[0].endswith(f" python -u -m infinity.deepspeed {started}")


def test_every_host_gets_a_command() -> None:
    request = Request(TRAIN, TWO, include="a@b:0,2", exports={"NCCL_DEBUG": "INFO now"})
    launch = translate(request, FOUR)
    variables = "NCCL_DEBUG='INFO now' CUDA_VISIBLE_DEVICES="
    assert launch.here is None
    assert [command.host for command in launch.commands] == ["a", "b"]
    meeting = "--master-addr=a --master-port=29500 --nproc-per-node=2"
    assert [command.shown() for command in launch.commands] == [
        f"{variables}0,1 torchrun --nnodes=2 --node-rank=0 {meeting} {SEEN}",
        f"{variables}0,2 torchrun --nnodes=2 --node-rank=1 {meeting} {SEEN}",
    ]


def test_counts_limit_the_hosts() -> None:
    launch = translate(Request(TRAIN, TWO, num_nodes=2, num_gpus=1, master_addr="m", master_port=5), FOUR)
    assert [command.arguments[:5] for command in launch.commands] == [
        ("--nnodes=2", f"--node-rank={node}", "--master-addr=m", "--master-port=5", "--nproc-per-node=1")
        for node in (0, 1)
    ]


def test_a_node_rank_runs_the_command_of_its_host_here() -> None:
    request = Request(TRAIN, TWO, node_rank=1, exports={"NCCL_DEBUG": "INFO"})
    launch = translate(request, replace(FOUR, environ={}))
    assert (launch.here, len(launch.commands), launch.commands[0].host) == (0, 1, None)
    assert launch.commands[0].environment == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert launch.commands[0].arguments[1] == "--node-rank=1"
    assert translate(replace(request, no_ssh=True), replace(FOUR, environ={})) == launch


def test_a_single_host_runs_here_and_says_so() -> None:
    def notes(name: str) -> tuple[str, ...]:
        return translate(Request(TRAIN, (Host(name, (0, 1)),)), FOUR).notes

    assert notes("here") == ()
    assert notes("worker-1") == (
        "worker-1 is the only host, so its ranks start here; --force_multi prints its command instead",
    )
    launch = translate(Request(TRAIN, TWO, include="b", force_multi=True), FOUR)
    assert (launch.here, launch.commands[0].host) == (None, "b")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(TRAIN, num_nodes=2), "--num_nodes is 2, but there is no hostfile"),
        (Request(TRAIN, node_rank=1), "--node_rank is 1, but there is no hostfile"),
        (Request(TRAIN, force_multi=True), "--force_multi needs a hostfile"),
        (Request(TRAIN, num_gpus=5), "--num_gpus is 5, but localhost has 4"),
        (Request(TRAIN, num_gpus=0), "--num_gpus is 0, not a positive number"),
        (Request(TRAIN, include="worker-0"), "'worker-0' is not one of the hosts localhost"),
        (Request(TRAIN, num_gpus=2, include="localhost"), "cannot be combined with --include"),
        (Request(TRAIN, TWO, num_nodes=1, exclude="a"), "cannot be combined with --include"),
        (Request(TRAIN, TWO, node_rank=2), "--node_rank is 2, but there are 2 hosts: choose 0 to 1"),
        (Request(TRAIN, TWO, no_ssh=True), "--no_ssh needs --node_rank on 2 hosts"),
        (Request(TRAIN, (Host("a", (0, 5)),)), "gives a the slot 5, but this machine has 4 GPUs"),
    ],
)
def test_contradictions_are_refused(request_: Request, said: str) -> None:
    assert said in refused(request_)


@pytest.mark.parametrize(
    ("program", "started"),
    [
        (Program("work", ("--x",), Kind.MODULE), ["-m", "work", "--local_rank=1", "--x"]),
        (Program("./run.sh", (), Kind.EXECUTABLE), ["--no_python", "./run.sh", "--local_rank=1"]),
        (Program("a b.py", ("--",), local_rank=False), ["a b.py", "--"]),
        (
            Program("a$.py", ("${local_rank}", "$$", "", "-m")),
            ["a$.py", "--local_rank=1", "${local_rank}", "$$", "", "-m"],
        ),
    ],
)
def test_torchrun_starts_the_program_with_its_arguments(program: Program, started: list[str]) -> None:
    """The printed line goes through a shell's rules, torchrun's parser and its macros, here for local rank 1."""
    command: Command = translate(Request(program, logs="a log"), CPU).commands[0]
    words = shlex.split(command.shown())
    assert words == ["torchrun", *command.arguments]
    parsed = parse_args(words[1:])
    assert (parsed.nproc_per_node, parsed.log_dir, parsed.redirects) == ("1", "a log", "3")
    _, _, arguments = config_from_args(parsed)
    assert macros.substitute(arguments, "1") == ["-u", "-m", "infinity.deepspeed", *started]


def test_plans_are_values() -> None:
    assert translate(Request(TRAIN), FOUR) == Launch(translate(Request(TRAIN), FOUR).commands, 0)
