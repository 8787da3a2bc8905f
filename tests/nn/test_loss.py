"""The chunked cross entropy against torch's."""

import pytest
import torch
import torch.nn.functional as F

from infinity.nn import loss as module
from infinity.nn.loss import token_cross_entropy


@pytest.fixture(params=["one chunk", "several chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several chunks":
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 37 + 5)  # 3 rows a chunk, 14 rows: the last one is short


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_and_gradient_are_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(2, 7, 37)).to(dtype).requires_grad_()
    targets = torch.randint(0, 37, (2, 7))
    targets[0, 2] = targets[1, 6] = -100
    reference = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(reference.view(-1, 37), targets.view(-1))
    torch.autograd.backward(3 * expected)

    loss = token_cross_entropy(logits, targets)
    torch.autograd.backward(3 * loss)

    assert loss.dtype == torch.float32 and logits.grad is not None and reference.grad is not None
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    assert logits.grad.dtype == dtype
    rtol, atol = (1e-2, 1e-5) if dtype == torch.bfloat16 else (1e-5, 1e-7)
    torch.testing.assert_close(logits.grad.float(), reference.grad, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("chunks")
def test_a_nan_or_an_infinite_logit_shows_in_the_loss() -> None:
    for bad in (float("nan"), float("inf")):
        logits = torch.randn(14, 37)
        logits[5, 3] = bad
        assert not token_cross_entropy(logits, torch.zeros(14, dtype=torch.int64)).isfinite()


@pytest.mark.usefixtures("chunks")
def test_no_target_counted_is_nan_as_in_torch() -> None:
    assert token_cross_entropy(torch.randn(14, 37, dtype=torch.bfloat16), torch.full((14,), -100)).isnan()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("ignore_index", [-100, 0, 255])
def test_ignored_rows_of_any_logits_count_nothing(ignore_index: int) -> None:
    """A class masked with minus infinity, as of padding, and rows of NaN leave loss and gradients as torch's."""
    torch.manual_seed(0)
    logits = torch.randn(14, 37).bfloat16()
    logits[:, 0] = -torch.inf
    targets = torch.randint(1, 37, (14,))
    targets[3] = targets[7] = ignore_index
    logits[7, 2:] = torch.nan
    reference, found = logits.clone().float().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, targets, ignore_index=ignore_index)
    torch.autograd.backward(expected)

    loss = token_cross_entropy(found, targets, ignore_index)
    torch.autograd.backward(loss)

    assert loss.isfinite() and found.grad is not None and reference.grad is not None
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(found.grad.float(), reference.grad, rtol=1e-2, atol=1e-5, equal_nan=True)
    assert not found.grad[3].any()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("target", [-1, 37])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    targets = torch.full((14,), 5)
    targets[4] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_cross_entropy(torch.randn(14, 37).bfloat16(), targets)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", [1, 13, 15, 28])
def test_another_number_of_targets_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="one target for each row"):
        token_cross_entropy(torch.randn(14, 37).bfloat16(), torch.zeros(count, dtype=torch.int64))


def test_pieces_are_larger_on_other_devices() -> None:
    on_cpu, elsewhere = (module._rows(torch.empty(8, 64, device=device)) for device in ("cpu", "meta"))
    assert elsewhere == 16 * on_cpu == 16 * module.CHUNK_ELEMENTS // 64
