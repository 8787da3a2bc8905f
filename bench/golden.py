"""Compares training with another commit's, bit by bit: losses and parameters of a set of small runs.

    python bench/golden.py --against HEAD~1       # about 3 minutes on 2 cores
    python bench/golden.py                        # print the digests of this commit

A change that only moves code must not change a bit. Each run trains a small transformer-like model for six steps, on
one thread of torch, with one combination of dtype, tiers, accumulation, clipping, optimizer, moments and schedule. The
exit status is 1 if a run differs. Digests of different machines may differ, since processors sum in different orders.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from checkout import REPOSITORY, checked_out, run_with, use

STEPS = 6
WIDTH = 64
VOCABULARY = 97


class Case(NamedTuple):
    """Settings of one run. param, optim: tiers."""

    dtype: str
    param: str
    optim: str
    accumulation: int
    clipping: float
    optimizer: str
    moments: str
    update: str = "auto"

    def config(self, folder: str) -> dict[str, Any]:
        """Return the engine's config; states on NVMe go to `folder`."""
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": 0,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": self.param, "nvme_path": folder},
                "offload_optimizer": {"device": self.optim, "nvme_path": folder},
            },
            "infinity": {"unit_size": 40_000, "tile_size": 4096, "moments": self.moments, "update": self.update},
        } | ({} if self.dtype == "fp32" else {self.dtype: {"enabled": True}})


def cases() -> Iterator[Case]:
    tiers = [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")]
    dtypes, optimizers, moments = ["fp32", "bf16", "fp16"], ["AdamW", "SGD"], ["fp32", "8bit"]
    for dtype, (param, optim), accumulation, clipping, optimizer, moment in itertools.product(
        dtypes, tiers, [1, 2], [0.0, 1.0], optimizers, moments
    ):
        if dtype != "fp16" or (optimizer == "AdamW" and moment == "fp32"):
            yield Case(dtype, param, optim, accumulation, clipping, optimizer, moment)
    for (accumulation, clipping), update in itertools.product([(1, 0.0), (2, 1.0)], ["next_forward", "after_backward"]):
        yield Case("bf16", "nvme", "nvme", accumulation, clipping, "AdamW", "fp32", update)


def run(case: Case) -> str:
    """Return the digest of the losses of a run, and of its parameters."""
    import torch

    import infinity
    from golden_model import Residual

    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(1)
    losses, parameters = hashlib.sha256(), hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        model = Residual(VOCABULARY, WIDTH)
        with infinity.initialize(model=model, config=case.config(folder))[0] as engine:
            for _ in range(STEPS * case.accumulation):
                tokens, targets = torch.randint(0, VOCABULARY, (2, 4, 16), generator=batches)
                loss = engine(tokens, targets)
                engine.backward(loss)
                engine.step()
                losses.update(loss.item().hex().encode())
            for _, value in sorted(engine.state_dict().items()):
                parameters.update(value.float().numpy().tobytes())
    return f"{losses.hexdigest()[:16]} {parameters.hexdigest()[:16]}"


def serve(tree: Path) -> dict[str, str]:
    """Return case → digest for the sources in `tree`."""
    use(tree)
    import torch

    torch.set_num_threads(1)
    return {" ".join(map(str, case)): run(case) for case in cases()}


def digests(tree: Path) -> dict[str, str]:
    return run_with(tree, __file__, ["--child", str(tree)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one commit's digests, as JSON
    args = parser.parse_args()
    if args.child:
        print(json.dumps(serve(Path(args.child))))
        return
    now = digests(REPOSITORY)
    if not args.against:
        for case, digest in now.items():
            print(f"{case:56} {digest}")
        return
    with checked_out(args.against) as tree:
        before = digests(tree)
    differing = [case for case in now if now[case] != before[case]]
    for case in differing:
        print(f"differs: {case}: {before[case]} at {args.against}, {now[case]} now")
    print(f"{len(now) - len(differing)} of {len(now)} runs have the same losses and parameters as at {args.against}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
