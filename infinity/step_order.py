"""Calls at a moment of the step at which they have no meaning: the errors of the engine's loop, and what to do."""

from __future__ import annotations

from infinity.errors import UsageError


def updated_during_backward(call: str) -> UsageError:
    """`call`, which drops gradients, after backward has updated units with them."""
    return UsageError(
        f"{call} cannot drop the gradients of this step: backward has already updated units with them. Call "
        'engine.step() first, or set infinity.update to "next_forward", so that backward updates nothing'
    )


def read_during_update(what: str) -> UsageError:
    """`what`, which reads parameters, after backward has updated units."""
    return UsageError(
        f"{what} between backward and engine.step(), and backward has already updated units with this step's "
        'gradients. Call engine.step() first, set infinity.update to "next_forward", which changes nothing before '
        "engine.step(), or, for several backwards a step, set gradient_accumulation_steps."
    )


def zero_grad_in_mid_step(micro_steps: int, accumulation: int) -> UsageError:
    """`optimizer.zero_grad()` while micro-batches are still to come."""
    return UsageError(
        f"optimizer.zero_grad() was called after {micro_steps} of {accumulation} micro-batches of a step, whose "
        "gradients are being summed; the step clears them itself. To drop them, call engine.drop_gradients()"
    )


def before_the_step(what: str, micro_steps: int, accumulation: int, *, spent: bool) -> UsageError:
    """`what`, which holds no gradients, between backward and step. spent: units were updated with them."""
    if micro_steps < accumulation and not spent:
        return UsageError(
            f"{what} holds no gradients, and {micro_steps} of {accumulation} micro-batches are in: call backward for "
            "the others and engine.step() first, or drop them with engine.drop_gradients()"
        )
    return UsageError(f"{what} holds no gradients: make it after engine.step(), not between backward and step")


def unscaled_loss(unscaled: int, micro_steps: int, scale: float) -> UsageError:
    """Gradients that lack the loss scale of fp16."""
    return UsageError(
        f"{unscaled} of {micro_steps} backwards of this step started from a loss that was not scaled by {scale:g}, as "
        "fp16 needs; the gradients were dropped. Call engine.backward(loss), or engine.scale(loss).backward()"
    )


def after_a_failed_backward() -> UsageError:
    """`optimizer.step()` over a part of the gradients."""
    return UsageError(
        "optimizer.step() was called after a backward that failed: its gradients are incomplete. Call the model again, "
        "which drops them, then backward and step"
    )
