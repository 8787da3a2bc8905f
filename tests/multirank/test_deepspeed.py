"""`infinity.deepspeed` on two ranks: averages, sizes, local parts, edits and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from multirank import deepspeed_cases
from multirank.cases import SAMPLES, global_batches
from support.models import Stack, seeded
from support.ranks import Group


@pytest.mark.every_case
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_train_as_one_loop(pair: Group, stage: int, tmp_path: Path) -> None:
    """Parameters, norm and clipping equal a loop over whole batches; each rank loads other samples."""
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    norm = 0.0
    for number, batch in enumerate(global_batches(4, SAMPLES * 2), 1):
        (model(*batch) / 2).backward()
        if number % 2 == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
    ranks = pair.run(deepspeed_cases.trained, stage=stage, folder=str(tmp_path))
    for rank, seen in enumerate(ranks):
        assert seen["sizes"] == (2, 2, rank, 4 * SAMPLES)
        assert seen["counts"] == (2, 8 * SAMPLES, 4)
        assert seen["norm"] == pytest.approx(norm, rel=1e-5)
        assert seen["saved"] is True
        for name, value in model.state_dict().items():
            torch.testing.assert_close(seen["states"][name], value, rtol=1e-5, atol=1e-6)
        assert (seen["edited"] == 5).all()
    assert {*ranks[0]["samples"], *ranks[1]["samples"]} == set(range(13))
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in ranks[0]["states"].items())
    if stage == 3:
        flat = ranks[0]["states"]["head.weight"].flatten()
        length = -(-flat.numel() // 2)
        assert torch.equal(torch.cat([seen["local"] for seen in ranks])[: flat.numel()], flat)
        for seen in ranks:
            assert seen["local"].shape == (length,)
            assert (seen["set"].flatten()[:length] == 0).all() and (seen["set"].flatten()[length:] == 1).all()
