"""Trains a small convolutional network on CIFAR-10 in DeepSpeed's loop, with a config from the command line.

    python examples/deepspeed/cifar10.py --deepspeed --deepspeed_config examples/deepspeed/cifar10.json

--data names the folder `cifar-10-batches-py` of the data set's Python version. Without it, images of ten colours with
noise are made on the spot. The script uses DeepSpeed's interface; with `import deepspeed` it is a DeepSpeed script.
"""

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import infinity.deepspeed as deepspeed

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Net(nn.Module):
    """(batch, 3, 32, 32) images → (batch, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.scores = nn.Linear(84, len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scores(self.classifier(self.features(images).flatten(1)))


def read_images(folder: Path, names: list[str]) -> Dataset:
    """Return CIFAR-10's images, scaled to −1 … 1, with their labels."""
    parts = []
    for name in names:
        with open(folder / name, "rb") as file:
            parts.append(pickle.load(file, encoding="bytes"))  # the data set's own format
    pixels = torch.cat([torch.as_tensor(part[b"data"]) for part in parts]).view(-1, 3, 32, 32)
    labels = torch.tensor([label for part in parts for label in part[b"labels"]])
    return TensorDataset(pixels / 127.5 - 1.0, labels)


def make_images(count: int, seed: int) -> Dataset:
    """Return `count` images, each of its class's colour with noise."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(len(CLASSES), 3, 1, 1, generator=torch.Generator().manual_seed(7)) * 2 - 1
    labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
    noise = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(colours[labels] + noise, labels)


def accuracy(engine: nn.Module, loader: torch.utils.data.DataLoader, dtype: torch.dtype) -> float:
    """Return the fraction of images that the engine classifies correctly."""
    engine.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            scores = engine(images.to(engine.device, dtype))
            correct += (scores.argmax(1).cpu() == labels).sum().item()
            total += len(labels)
    engine.train()
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description="CIFAR-10")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder cifar-10-batches-py")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    if args.data is not None:
        training = read_images(args.data, [f"data_batch_{number}" for number in range(1, 6)])
        testing = read_images(args.data, ["test_batch"])
    else:
        training, testing = make_images(640, seed=1), make_images(200, seed=2)

    net = Net()
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=training
    )
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    test_loader = engine.deepspeed_io(testing, batch_size=50, route="eval")
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(engine.device, dtype), labels.to(engine.device)
            loss = F.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        score = accuracy(engine, test_loader, dtype)
        if engine.global_rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}, accuracy {100 * score:.0f} %", flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
