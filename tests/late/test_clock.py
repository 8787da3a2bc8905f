"""Threads of virtual time meet in the order of their clocks. Each test runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAD = """
import torch
from late import clock, threads
time = clock.start(clock.Rates(launch=1.0, event=0.0, kernel=0.0, device=4.0, to_device=1.0))
"""


def run(script: str) -> str:
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {tests!r})\n{HEAD}{script}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.stdout


def test_a_kernel_starts_after_its_stream_its_launch_and_its_event() -> None:
    script = """
there = torch.empty(8, dtype=torch.uint8, device="late")
copies = torch.Stream("late:0")
with copies:
    there.copy_(torch.zeros(8, dtype=torch.uint8), non_blocking=True)  # 1 to 9
torch.accelerator.current_stream().wait_stream(copies)
there.zero_()  # issued until 2; 9 to 13, reading and writing 8 bytes
there.zero_()  # 13 to 17
print(time.now, time.reached())
torch.accelerator.synchronize()
print(time.now)
"""
    assert run(script).split() == ["3.0", "17.0", "17.0"]


def test_threads_run_in_the_order_of_their_clocks() -> None:
    script = """
done, order = threads.SimpleQueue(), []
def work(name, *seconds):
    for each in seconds:
        time.work("work", each)
        order.append(f"{name}{time.now:g}")
    done.put(name)
for name, *seconds in (("a", 2, 2, 2), ("b", 3, 3)):
    threads.Thread(lambda name=name, seconds=seconds: work(name, *seconds), name).start()
time.work("work", 5)
order.append(f"model{time.now:g}")
print(*order, done.get(), done.get(), time.now)
"""
    assert run(script).split() == ["a2", "b3", "a4", "model5", "a", "b", "6.0"]


def test_a_wait_takes_the_clock_of_the_thread_that_ends_it() -> None:
    script = """
executor = threads.ThreadPoolExecutor(1, "executor")
future = executor.submit(lambda: time.work("work", 7))
print(future.done())
time.work("work", 1)
print(future.done())
future.result()
print(time.now, future.done())
executor.shutdown()
"""
    assert run(script).split() == ["False", "False", "7.0", "True"]


def test_threads_that_wait_for_one_another_raise() -> None:
    assert "RuntimeError: Every thread waits for another one: model." in run("threads.SimpleQueue().get()")
