"""The first block of docs/rollouts.md is a whole program, which needs transformers and little time on one thread."""

import torch

torch.set_num_threads(1)
