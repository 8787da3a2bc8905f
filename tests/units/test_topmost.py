"""The topmost saved-tensor hooks of a thread, which torch 2.6 and 2.7 have in C++ only."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity.units.topmost import topmost_hooks


def test_the_innermost_are_on_top() -> None:
    def hook(tensor: Any) -> Any:
        return tensor

    pairs = [(hook, lambda found: found), (lambda found: found, hook)]
    assert topmost_hooks(True) is None
    with saved_tensors_hooks(*pairs[0]):
        with saved_tensors_hooks(*pairs[1]):
            assert topmost_hooks(True) == topmost_hooks(False) == pairs[1]
        assert topmost_hooks(True) == pairs[0]
    assert topmost_hooks(True) is None


def test_each_thread_has_its_own() -> None:
    with saved_tensors_hooks(lambda x: x, lambda x: x), ThreadPoolExecutor(1) as thread:
        assert thread.submit(topmost_hooks, True).result() is None


def test_tracing_hides_them_on_request() -> None:
    set_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        set_tracing(True)
        try:
            assert topmost_hooks(False) is None and topmost_hooks(True) is not None
            assert topmost_hooks(False) is None, "it traces no longer"
        finally:
            set_tracing(False)


def test_no_reference_is_kept_or_lost() -> None:
    def hook(tensor: Any) -> Any:
        return tensor

    with saved_tensors_hooks(hook, hook):
        before = sys.getrefcount(hook)
        for _ in range(100):
            topmost_hooks(True)
        assert sys.getrefcount(hook) == before
        kept = [topmost_hooks(True) for _ in range(100)]
        assert sys.getrefcount(hook) == before + 200
        del kept
        assert sys.getrefcount(hook) == before
