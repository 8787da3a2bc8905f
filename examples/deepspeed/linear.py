"""Trains an nn.Linear in DeepSpeed's loop, with parameters, gradients and optimizer states below the surface.

    python examples/deepspeed/linear.py
    torchrun --nproc-per-node 2 examples/deepspeed/linear.py

The script uses DeepSpeed's interface; with the import `import deepspeed` it is a DeepSpeed script.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import infinity.deepspeed as deepspeed

CONFIG = {
    "train_batch_size": 16,
    "steps_per_print": 50,
    "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, inputs @ torch.randn(10, 1) + 0.5)
    model = nn.Linear(10, 1)

    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data, config=CONFIG
    )
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for x, y in loader:
            x, y = x.to(engine.device), y.to(engine.device)
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
