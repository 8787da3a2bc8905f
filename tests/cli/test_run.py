"""`infinity run` in real processes: ranks, arguments, exit status, signals, hosts, and texts of errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from infinity.cli.run import exit_as_rank
from support.commands import refused, run

RUN = [sys.executable, "-m", "infinity.cli.main", "run"]

RECORD = """
import json, os, sys
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank" + os.environ["RANK"])
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES MASTER_ADDR".split()
names += "LOCAL_WORLD_SIZE GROUP_RANK MASTER_PORT OMP_NUM_THREADS TORCHELASTIC_RUN_ID".split()
with open(path + ".part", "w") as file:
    json.dump([sys.argv[1:], {name: os.environ.get(name) for name in names}], file)
os.rename(path + ".part", path)
"""
"""Start of a script that records its arguments and variables in a file beside it, as quickly as a script can."""


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start `infinity run` on a machine that seems to have no GPU."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [*RUN, *map(str, arguments)],
        env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def write(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(RECORD + text)
    return file


def record(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"rank{rank}").read_text())


def appears(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert process.poll() is None, ended(process)
        time.sleep(0.02)


def test_two_ranks_reduce_over_gloo_and_the_failed_one_gives_the_status(tmp_path: Path) -> None:
    """Rank 0 would wait for minutes; it is ended when rank 1 fails."""
    text = """
import time
import deepspeed, infinity.deepspeed, torch, torch.distributed as dist
assert deepspeed is infinity.deepspeed
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if os.environ["RANK"] == "0":
    print("total", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(300)
"""
    arguments = ["--deepspeed", "--deepspeed_config", "x $$ ${local_rank}.json", "--", "--num_gpus", "9", "--help", ""]
    code, out, err = ended(start("--num_gpus", "2", write(tmp_path, text), *arguments))
    assert (code, out) == (7, "total 3.0\n"), err
    note, command, *_, last = err.splitlines()
    assert note == "note: no GPU: starting 2 ranks on the CPU"
    assert "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m infinity.deepspeed" in command
    assert last == "infinity: rank 1 ended with exit status 7: see its output" and "Traceback" not in err
    for rank in range(2):
        received, variables = record(tmp_path, rank)
        assert received == [f"--local_rank={rank}", *arguments]
        assert (variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (str(rank), "2")
        assert (variables["LOCAL_SIZE"], variables["CROSS_RANK"], variables["CROSS_SIZE"]) == ("2", "0", "1")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (-9, 137, "rank 3 was ended by SIGKILL"),
        (-35, 163, "rank 3 was ended by signal 35"),
        (5, 5, "rank 3 ended with exit status 5: see its output"),
    ],
)
def test_a_rank_that_a_signal_ended_is_named(
    status: int, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as error:
        exit_as_rank(3, status)
    assert error.value.exit_code == code and capsys.readouterr().err == f"infinity: {said}\n"


def test_a_single_rank_replaces_the_launcher(tmp_path: Path) -> None:
    """The rank has the launcher's process id, its own exit status, and a process group."""
    text = """
import deepspeed, infinity.deepspeed, torch, torch.distributed as dist
assert deepspeed is infinity.deepspeed and "torchrun" not in sys.modules
dist.init_process_group("gloo")
total = torch.tensor([3.0])
dist.all_reduce(total)
print("total", total.item(), "of", dist.get_world_size(), "in", os.getpid())
os._exit(7)
"""
    process = start(write(tmp_path, text), "--deepspeed", "$$", "${local_rank}")
    code, out, err = ended(process)
    assert (code, out) == (7, f"total 3.0 of 1 in {process.pid}\n"), err
    note, command = err.splitlines()
    assert note == "note: no GPU: starting 1 rank on the CPU" and command.startswith("RANK=0 WORLD_SIZE=1 ")
    received, variables = record(tmp_path, 0)
    assert received == ["--local_rank=0", "--deepspeed", "$$", "${local_rank}"]
    port = variables.pop("MASTER_PORT")
    assert f" MASTER_PORT={port} " in command and 1024 <= int(port) < 65536
    assert {name: value for name, value in variables.items() if value != "0"} == {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        **{"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""},
        **dict.fromkeys(("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")),
    }


def test_the_printed_command_of_a_single_rank_runs_it_in_a_shell(tmp_path: Path) -> None:
    script = write(tmp_path, "")
    process = start("--dry-run", script, "a b")
    _, _, err = ended(process)
    assert not (tmp_path / "rank0").exists()
    subprocess.run(err.splitlines()[-1], shell=True, check=True, timeout=60)
    assert record(tmp_path, 0)[0] == ["--local_rank=0", "a b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_single_rank_as_it_ends_any_process(tmp_path: Path, number: signal.Signals) -> None:
    """SIGINT raises KeyboardInterrupt in the script, after which Python ends itself by SIGINT."""
    process = start("--quiet", write(tmp_path, "import time; open(path + '.ready', 'w').close(); time.sleep(300)"))
    appears(tmp_path / "rank0.ready", process)
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out) == (-number, "")
    assert err == "" if number != signal.SIGINT else err.endswith("KeyboardInterrupt\n")


def test_a_launcher_without_a_gpu_driver_does_not_import_torch(tmp_path: Path) -> None:
    program = """
import os, sys
import infinity.cli.run as run
run._ROCM_DEVICE, run._GPU_DRIVERS = run.Path("none"), ("libnone.so",)
os.execvpe = lambda program, command, environ: print("torch" in sys.modules, command[-1])
from infinity.cli.main import app
app(["run", sys.argv[1]])
"""
    done = subprocess.run([sys.executable, "-c", program, write(tmp_path, "")], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"False --local_rank=0\n"), done.stderr


def test_resume_starts_a_single_rank_by_infinity_run(tmp_path: Path) -> None:
    """A child of the rank inherits the environment, but has a command of its own."""
    code, out, err = ended(start("-q", write(tmp_path, _COMMANDS), "x", cwd=tmp_path))
    assert code == 0, err
    (command, folder), (of_child, _) = map(json.loads, out.splitlines())
    assert command == [*RUN, "-q", str(tmp_path / "train.py"), "x"] and folder == str(tmp_path)
    assert of_child[1] == "-c"


_COMMANDS = """
import subprocess
os.chdir("/")
text = '''
import json
from infinity.durable.command import command_line, start_folder
print(json.dumps([command_line(), start_folder()]), flush=True)
'''
exec(text)
subprocess.run([sys.executable, "-c", text], check=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """Each rank gets the signal once, and may clean up."""
    text = """
import signal, time
def clean_up(number, frame):
    time.sleep(0.3)
    with open(path + ".signals", "a") as file:
        file.write(signal.Signals(number).name + " ")
    sys.exit(0)
signal.signal(signal.SIGINT, clean_up)
signal.signal(signal.SIGTERM, clean_up)
open(path + ".ready", "w").close()
time.sleep(300)
"""
    process = start("--quiet", "--no_local_rank", "--num_gpus", "2", write(tmp_path, text))
    for rank in range(2):
        appears(tmp_path / f"rank{rank}.ready", process)
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 128 + number, err
    assert err.splitlines()[-1] == f"infinity: stopped by {number.name}; all ranks have ended"
    assert "Traceback" not in err and "torchrun" not in err
    for rank in range(2):
        assert record(tmp_path, rank)[0] == []
        assert (tmp_path / f"rank{rank}.signals").read_text() == f"{number.name} "


def test_a_signal_as_torchruns_timer_begins(tmp_path: Path) -> None:
    """torch 2.13 then raises another error, in which the signal is only the context."""
    text = """
open(path + ".ready", "w").close()
import time
time.sleep(300)
"""
    program = """
import os, signal, sys, time
from torch.distributed.elastic.metrics import api
class Clock:
    def time(self):
        if os.path.exists(sys.argv[1]):
            os.remove(sys.argv[1])
            os.kill(os.getpid(), signal.SIGTERM)
        return time.time()
api.time = Clock()
from infinity.cli.main import app
app(["run", "--quiet", "--no_local_rank", "--num_gpus", "2", sys.argv[2]])
"""
    arguments = [str(tmp_path / "rank0.ready"), str(write(tmp_path, text))]
    process = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, process.stderr
    assert process.stderr.splitlines()[-1] == "infinity: stopped by SIGTERM; all ranks have ended"
    assert "Traceback" not in process.stderr


def test_hosts_with_different_slots_join(tmp_path: Path) -> None:
    """Both hosts are this one, started as each host would be."""
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")
    script = write(tmp_path, "")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    common = ["-H", tmp_path / "hosts", "--include", "a:1@b:0,3", "--master_addr", "127.0.0.1", "--master_port", port]
    processes = [start(*map(str, common), "--node_rank", str(node), "--no_ssh", script) for node in (0, 1)]
    for process in processes:
        code, _, err = ended(process)
        assert code == 0, err
    seen = [record(tmp_path, rank) for rank in range(3)]
    assert [arguments for arguments, _ in seen] == [["--local_rank=0"], ["--local_rank=0"], ["--local_rank=1"]]
    assert [variables["CUDA_VISIBLE_DEVICES"] for _, variables in seen] == ["1", "0,3", "0,3"]
    assert [variables["CROSS_RANK"] for _, variables in seen] == ["0", "1", "1"]
    assert {variables["WORLD_SIZE"] for _, variables in seen} == {"3"}


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = ended(
            start("--num_gpus", "2", "--master_port", str(taken.getsockname()[1]), write(tmp_path, ""))
        )
    assert code == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("infinity: ranks cannot connect: ")
    assert err.splitlines()[-1].endswith("Choose another --master_addr or --master_port.")


def test_a_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, "")
    result = run("run", "--dry-run", "--enable_each_rank_log", "logs", script, "--deepspeed")
    assert (result.exit_code, result.stdout) == (0, "")
    shown = result.stderr.splitlines()[-1]
    assert "torchrun --standalone" in shown and "--log-dir=logs --redirects=3" in shown
    assert shown.endswith(f"-m infinity.deepspeed {script} '--local_rank=${{local_rank}}' --deepspeed")
    assert sorted(tmp_path.iterdir()) == [script]


def test_a_dry_run_of_modules_and_programs() -> None:
    for flag, kind in (("--module", "-m"), ("-m", "-m"), ("--no_python", "--no_python")):
        result = run("run", "--dry-run", "--no_local_rank", flag, "work", "x")
        assert result.stderr.splitlines()[-1].endswith(f" -u -m infinity.deepspeed {kind} work x")


def test_several_hosts_are_printed_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setattr("infinity.cli.run.DEEPSPEED_ENVIRONMENT_PATHS", ["."])  # the home may have one
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n")
    options = ("run", "--hostfile", "hosts", "--num_nodes", "2", "elsewhere.py")
    result = run(*options)
    assert result.exit_code == 1 and "nothing was started: run each command on its host" in result.stderr
    dry = run(*options[:1], "--dry-run", *options[1:])
    assert dry.exit_code == 0
    assert result.stderr.splitlines()[:-1] == dry.stderr.splitlines()
    first, command, *_ = dry.stderr.splitlines()
    assert first == "note: on a:"
    assert command.startswith("NCCL_DEBUG=WARN CUDA_VISIBLE_DEVICES=0 torchrun --nnodes=2 --node-rank=0 ")
    assert command.endswith("-m infinity.deepspeed elsewhere.py '--local_rank=${local_rank}'")


def test_errors_are_one_line_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_bytes(b"a slots=1\na\n\xff slots\n")
    (tmp_path / "good").write_text("a slots=1\n")
    for code, said, arguments in (
        (2, "the script none.py does not exist: pass an existing file", ["none.py"]),
        (2, "--module and --no_python cannot be combined", ["-m", "--no_python", "x"]),
        (
            2,
            "'a' does not name a host: write HOST slots=N; bad, line 3: '� slots' does not name a host",
            ["-H", "bad", "x.py"],
        ),
        (2, "--include: 'b' is not one of the hosts a", ["-H", "good", "--include", "b", "x.py"]),
        (1, "--hostfile none: No such file or directory: name a readable file", ["--hostfile", "none", "x.py"]),
        (
            2,
            "--log_level must be one of debug, info, warning, error, critical, not 'loud'",
            ["--log_level", "loud", "x"],
        ),
        (2, "--num_nodes is 2, but there is no hostfile", ["--num_nodes", "2", "x.py"]),
    ):
        refused(code, said, "run", *arguments)


def test_unknown_options_and_a_missing_script_show_the_usage() -> None:
    for arguments, said in ((["--nonsense", "x.py"], "No such option: --nonsense"), ([], "Missing argument 'SCRIPT'")):
        result = run("run", *arguments)
        assert result.exit_code == 2 and said in result.stderr and "Usage:" in result.stderr


def test_ranks_are_bound_to_their_processors(tmp_path: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    file = write(tmp_path, "print('bound to', *os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])")
    status, out, err = ended(start("--bind_cores_to_rank", "--bind_core_list", f"{own[0]}", "-q", file))
    assert (status, out) == (0, f"bound to {own[0]} 1\n"), err
    status, _, err = ended(start("--bind_core_list", "0", file))
    assert status == 2 and "--bind_core_list has no effect without --bind_cores_to_rank: add it" in err
