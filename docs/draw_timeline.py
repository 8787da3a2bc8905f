"""Profiles three steps of a GPT-2 with everything on NVMe, and draws the lanes (docs/plan.md, section Timeline):

python docs/draw_timeline.py /local_nvme            # needs matplotlib; prints the table of docs/plan.md
python docs/draw_timeline.py /local_nvme out.png    # draws to another file
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import infinity
from infinity.cli import timeline
from infinity.sim.gpt2 import GPT2, GPT2Config

PICTURE = Path(__file__).parents[1] / "bench" / "results" / "timeline.png"
SHAPE = GPT2Config(vocab_size=4096, seq_length=32, num_layers=8, hidden_size=768, num_attention_heads=12)


def main(folder: str, picture: Path = PICTURE) -> None:
    place = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"cache_bytes": 0},
    }
    torch.manual_seed(0)
    torch.set_num_threads(1)  # leaves a core to the drive's and the update's threads
    engine, *_ = infinity.initialize(model=GPT2(SHAPE), config=config)
    tokens = torch.randint(SHAPE.vocab_size, (1, SHAPE.seq_length + 1))
    with tempfile.TemporaryDirectory() as made, engine:
        trace = Path(made, "trace.json")
        for number in range(6):
            if number == 3:
                engine.profile(3, trace)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
        timeline.run(trace, picture, as_json=False)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:3]))
