"""Errors for calls in the wrong order within a step, each with its fix."""

from __future__ import annotations

from infinity.errors import UsageError


def updated_during_backward(call: str) -> UsageError:
    """Error for `call`, which drops gradients, after backward has updated units with them."""
    return UsageError(
        f"{call} cannot drop the gradients of this step: backward has already updated units with them. Call "
        'engine.step() first, or set infinity.update to "next_forward", so that backward updates nothing'
    )


def read_during_update(what: str) -> UsageError:
    """Error for a read of parameters after backward has updated units. what: a clause that begins the text."""
    return UsageError(
        f"{what} between backward and engine.step(), and backward has already updated units with this step's "
        'gradients. Call engine.step() first, set infinity.update to "next_forward", which changes nothing before '
        "engine.step(), or, for several backwards a step, set gradient_accumulation_steps."
    )


def changed_during_update(group: int, names: str) -> UsageError:
    """Error for hyper-parameters `names` of a param_group that were changed after backward had updated units."""
    return UsageError(
        f"{names} of param_group {group} changed between backward and engine.step(), and backward has already updated "
        "units with the values before. Change them before backward or after engine.step(), or set infinity.update to "
        '"next_forward", which changes nothing before engine.step(). To go on, set them back.'
    )


def zero_grad_in_mid_step(micro_steps: int, accumulation: int) -> UsageError:
    """Error for `optimizer.zero_grad()` before the last micro-batch of a step."""
    return UsageError(
        f"optimizer.zero_grad() was called after {micro_steps} of {accumulation} micro-batches of a step, whose "
        "gradients are being summed; the step clears them itself. To drop them, call engine.drop_gradients()"
    )


def before_the_step(what: str, micro_steps: int, accumulation: int, *, spent: bool) -> UsageError:
    """Error for `what` (a noun), which holds no gradients, between backward and step. spent: they updated units."""
    if micro_steps < accumulation and not spent:
        return UsageError(
            f"{what} holds no gradients, and {micro_steps} of {accumulation} micro-batches are in: call backward for "
            "the others and engine.step() first, or drop them with engine.drop_gradients()"
        )
    return UsageError(f"{what} holds no gradients: make it after engine.step(), not between backward and step")


def unscaled_loss(unscaled: int, micro_steps: int, scale: float) -> UsageError:
    """Error for gradients without the loss scale of fp16."""
    return UsageError(
        f"{unscaled} of {micro_steps} backwards of this step started from a loss that was not scaled by {scale:g}, as "
        "fp16 needs; the gradients were dropped. Call engine.backward(loss), or engine.scale(loss).backward()"
    )


def after_a_failed_backward() -> UsageError:
    """Error for `optimizer.step()` after a backward that an exception cut short."""
    return UsageError(
        "optimizer.step() was called after a backward that failed: its gradients are incomplete. Call the model again, "
        "which drops them, then backward and step"
    )
