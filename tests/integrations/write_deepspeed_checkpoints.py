"""Writes tests/integrations/deepspeed_checkpoints with the real DeepSpeed, on the CPU. Not a test.

    DS_BUILD_OPS=0 pip install deepspeed==0.19.8
    DS_ACCELERATOR=cpu python tests/integrations/write_deepspeed_checkpoints.py [NAME ...]

Beside each checkpoint it writes truth.safetensors (masters and moments, through DeepSpeed's own `safe_get_full_*`),
fp32.safetensors (the result of DeepSpeed's `zero_to_fp32`) and truth.json (losses of the next steps).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.deepspeed_model import CASES, NEXT_STEPS, STEPS, Case, TinyModel, batch_of, param_groups

FOLDER = Path(__file__).parent / "deepspeed_checkpoints"
MOMENTS = {"SGD": ("momentum_buffer",)}


def main(names: list[str]) -> None:
    for name in names or CASES:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        torch.multiprocessing.spawn(write, args=(name, CASES[name]), nprocs=CASES[name].ranks)
        finish(FOLDER / name, CASES[name])
        print(f"wrote {name}")


def config_of(case: Case) -> dict[str, Any]:
    precision = {} if case.dtype == "fp32" else {case.dtype: {"enabled": True}}
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0, **case.zero}
    return {
        "train_micro_batch_size_per_gpu": 4 // case.ranks,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **precision,
        **case.config,
    }


def write(rank: int, name: str, case: Case) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29613",
    }
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    zero = case.stage == 3
    config = config_of(case)
    with deepspeed.zero.Init(config_dict_or_path=config) if zero else contextlib.nullcontext():
        model = TinyModel(**case.model)
    optimizer = getattr(torch.optim, case.optimizer)(param_groups(model, case), **case.hyper)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = engine(*batch_of(step, rank, case.ranks))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().float()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / case.ranks)
        return losses

    train(0, STEPS)
    engine.save_checkpoint(str(FOLDER / name), client_state=dict(case.client_state))
    states = truth_of(engine, case)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    losses = train(STEPS, STEPS + NEXT_STEPS)
    if rank == 0:
        save_file(states, FOLDER / name / "truth.safetensors")
        facts = {"deepspeed": deepspeed.__version__, "losses": losses, "lr": rates}
        (FOLDER / name / "truth.json").write_text(json.dumps(facts, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def truth_of(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return state/name → value of every parameter and buffer, from the live engine."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = MOMENTS.get(case.optimizer, ("exp_avg", "exp_avg_sq"))
    found = {f"buffer/{name}": value.detach().clone() for name, value in engine.module.named_buffers()}
    masters = (master for group in getattr(engine.optimizer, "fp32_groups", []) for master in group)
    for name, parameter in engine.module.named_parameters():
        if case.stage == 0 and case.dtype == "fp32":
            found[f"master/{name}"] = parameter.detach().clone()
            state = engine.optimizer.state[parameter]
            found |= {f"{key}/{name}": state[key].clone() for key in moments}
        elif case.stage == 0:
            master = next(masters)
            state = engine.optimizer.optimizer.state[master]
            found[f"master/{name}"] = master.detach().clone()
            found |= {f"{key}/{name}": state[key].clone() for key in moments}
        elif parameter.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in moments:
                whole = (
                    safe_get_full_optimizer_state(parameter, key)
                    if case.stage == 3
                    else whole_of(engine, parameter, key)
                )
                found[f"{key}/{name}"] = whole.clone()
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], enabled=case.stage == 3):
                found[f"param/{name}"] = parameter.detach().clone()
    return found


def whole_of(engine: Any, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
    """Return a parameter's moment in stages 1 and 2, from the fragments that the live ranks hold."""
    optimizer, whole = engine.optimizer, torch.zeros(parameter.numel())
    fragment = parameter._hp_mapping
    if fragment is not None:
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
        state = optimizer.optimizer.state[flats[fragment.param_group_index]][key]
        ours, theirs = fragment.lp_fragment_address, fragment.hp_fragment_address
        whole[ours.start : ours.start + ours.numel] = state[theirs.start : theirs.start + theirs.numel]
    torch.distributed.all_reduce(whole)
    return whole.view(parameter.shape)


def finish(folder: Path, case: Case) -> None:
    """Convert to a universal checkpoint if the case is one, and remove what is not a part of the test."""
    (tag,) = (path.name for path in folder.iterdir() if path.is_dir())
    if case.stage > 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        save_file({name: value.clone() for name, value in whole.items()}, folder / "fp32.safetensors")
    if case.universal:
        arguments = ["--input_folder", str(folder / tag), "--output_folder", str(folder / f"{tag}_universal")]
        converter = "deepspeed.checkpoint.ds_to_universal"
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        injected = ["--inject_missing_state"] if case.stage < 3 else []
        subprocess.run([sys.executable, "-m", converter, *arguments, *workers, *injected], check=True)
        shutil.rmtree(folder / tag)
        (folder / "latest").unlink()
        if case.stage < 3:
            assert not any((folder / f"{tag}_universal").glob("zero_pp*"))
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        (folder / script).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
