"""`CPUAdam`: torch.optim.AdamW for parameters in host memory, in one pass of the native kernels.

Works without an engine:

    optimizer = infinity.optim.CPUAdam(model.parameters(), lr=3e-4, weight_decay=0.1, moments="8bit")

States of a parameter, in its shape except `step` and scales:
    step                        fp32 scalar, as in torch.optim.AdamW
    exp_avg, exp_avg_sq         fp32 or bf16
    exp_avg_8bit, exp_avg_sq_8bit, exp_avg_scale, exp_avg_sq_scale
                                in place of these two with moments="8bit": uint8 codes, one uint8 scale per 256 elements
    remainder                   int16, for bf16 parameters: fp32 master minus parameter (`infinity.optim.cpu_adam`)
    master                      fp32, for fp16 parameters

With moments in fp32 or bf16, CPUAdam and torch.optim's Adam and AdamW load each other's state dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError, ModelError
from infinity.native import _adam
from infinity.optim.cpu_adam import CPU, DTYPES, array_arguments
from infinity.optim.moments import moment_from_fp32, moment_to_fp32, rounding_key, zero_moments
from infinity.plan.formats import FORMATS, moments_in
from infinity.rules import RULES, Hyper, MomentFormat

_NAMES = RULES["adamw"].moments
_EXTRA = {torch.bfloat16: ("remainder", torch.int16), torch.float16: ("master", torch.float32)}
"""Parameter dtype → name and dtype of the state that completes it to fp32."""


class _Prepared:
    """Updates that one call performs: waking threads for each takes as long as a small update."""

    def __init__(self) -> None:
        self.updates: list[_adam.Update] = []
        self.params: list[Tensor] = []
        self.steps: list[Tensor] = []

    def perform(self, threads: int) -> None:
        _adam.update_all(self.updates, threads)
        if self.params:
            torch.autograd.graph.increment_version(self.params)  # written by address, unseen by autograd
            torch._foreach_add_(self.steps, 1)
        self.updates.clear()
        self.params.clear()
        self.steps.clear()


class CPUAdam(torch.optim.Optimizer):
    """AdamW, or Adam with L2 decay, for fp32, bf16 and fp16 parameters on the CPU.

    params, lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW. amsgrad, capturable and differentiable are
        refused; foreach and fused are accepted without effect.
    adamw_mode: decoupled weight decay (AdamW); False: L2 decay (torch.optim.Adam). Sets a group's
        `decoupled_weight_decay`.
    moments: "fp32", "bf16" or "8bit". The latter two are rounded stochastically, from `seed`.
    threads: 0 is one per processor of the calling thread's affinity.

    A bf16 parameter is trained in fp32: its lower 16 bits are kept as state. An fp16 parameter has an fp32 master,
    initialised from the parameter at its first step; values written to the parameter later are overwritten. Parameters
    and gradients may have any strides, but non-contiguous ones are copied.

    Raises ConfigError for unsupported arguments, ModelError for unsupported parameters and gradients. Both are
    ValueErrors.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        adamw_mode: bool = True,
        moments: MomentFormat = "fp32",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        if moments not in FORMATS:
            raise ConfigError(f"moments is {moments!r}: give one of {', '.join(FORMATS)}")
        for name, value in (("seed", seed), ("threads", threads)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}: give a whole number, 0 or more")
        self.moments: MomentFormat = moments
        """Format of the moments."""
        self.seed = seed
        """Seed of the stochastic rounding."""
        self.threads = threads
        """Threads of one update; 0: one per processor of the calling thread's affinity."""
        # The keys of torch.optim.AdamW, so that either loads the other's groups.
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused, "decoupled_weight_decay": adamw_mode}
        _hyper(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _hyper(group)
            for param in group["params"]:
                _check(param)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Update every parameter that has a gradient. Returns the value of `closure`.

        grad_scale: factor applied to gradients as they are read, such as 1 / loss scale or a clipping coefficient.
        """
        loss, prepared = None, _Prepared()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        try:
            for group in self.param_groups:
                hyper = _hyper(group)
                scale = -grad_scale if group["maximize"] else grad_scale
                native = _adam.Group(**hyper.arguments, grad_scale=scale)
                for param in group["params"]:
                    if param.grad is not None:
                        self._prepare(param, number, native, prepared)
                    number += 1
        finally:
            prepared.perform(self.threads)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's layout. The tensors are the optimizer's own: copy them to keep them past the next step."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states and groups of CPUAdam, torch.optim.Adam or AdamW for the same parameters.

        Converts moments to this optimizer's format. Without a remainder or master for a bf16 or fp16 parameter, as
        from torch, starts from the parameter's value. Raises ModelError or ConfigError for other state dicts.
        """
        handle = self.register_load_state_dict_pre_hook(_check_groups)
        given: list[dict[str, Any]] = []  # the dict after the user's hooks
        last = self.register_load_state_dict_pre_hook(lambda _, changed: given.append(changed))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            last.remove()
        [state_dict] = given
        # torch casts all states to the parameter's dtype, codes and remainders too: load the saved ones instead.
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, (there, param) in enumerate(zip(saved, params, strict=True)):
            state = state_dict["state"].get(there)
            if state:
                self.state[param] = self._adopt(param, number, state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"moments": self.moments, "seed": self.seed, "threads": self.threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            # Groups of Adam and AdamW of torch 2.6 lack it, since their classes decide.
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])

    # -- one parameter -------------------------------------------------------------------------------------------------

    def _prepare(self, param: Tensor, number: int, group: _adam.Group, prepared: _Prepared) -> None:
        """Add the update of `param` to `prepared`."""
        _check(param)
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ModelError("CPUAdam does not take sparse gradients: construct embeddings with sparse=False")
        state = self.state[param]
        if not state:
            state.update(self._first_state(param))
        step = int(state["step"].item()) + 1
        moments, scales = moments_in("adamw", state)
        extra = _EXTRA.get(param.dtype)
        for name in ("remainder", "master"):
            if name in state and (extra is None or extra[0] != name):
                del state[name]  # the model was cast: the state would become stale
        if extra is not None and extra[0] not in state:
            state.update(_rest(param, {}))  # the model was cast after its first step
        kept = None if extra is None else state[extra[0]]
        flat = param.contiguous()
        dense = grad.resolve_neg().contiguous()
        arrays = array_arguments(CPU, flat, kept, dense, moments, scales, "adamw")
        prepared.updates.append(group.prepare(*arrays, step, self._key(number, step)))
        prepared.params.append(param)
        prepared.steps.append(state["step"])
        if flat is not param or dense is not grad:  # copies, which live until this returns
            prepared.perform(self.threads)
        if flat is not param:
            param.copy_(flat)

    def _key(self, number: int, step: int) -> int:
        """Return the key of the stochastic rounding of parameter `number` in this step."""
        return rounding_key(self.seed, (number << 40) + step)

    def _first_state(self, param: Tensor) -> dict[str, Tensor]:
        moments, scales = zero_moments("adamw", param.numel(), self.moments)
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for k, name in enumerate(_NAMES):
            state[f"{name}_8bit" if scales else name] = moments[k].view(param.shape)
            if scales:
                state[f"{name}_scale"] = scales[k]
        return state | _rest(param, {})

    def _adopt(self, param: Tensor, number: int, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Return a state of this optimizer with the values of `saved`, without shared memory."""
        step = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu").clone()
        state = {"step": step}
        for k, name in enumerate(_NAMES):
            root = k == 1
            stored, scale = saved.get(name), None
            if stored is None:
                stored, scale = saved[f"{name}_8bit"], saved[f"{name}_scale"]
            if stored.shape != param.shape:
                raise ModelError(
                    f"{name} of parameter {number} has shape {tuple(stored.shape)}, the parameter has "
                    f"{tuple(param.shape)}: load states of the same model"
                )
            if stored.dtype == FORMATS[self.moments]:
                stored = _copied(stored)
                scale = None if scale is None else _copied(scale)
            else:
                values = moment_to_fp32(_copied(stored), None if scale is None else scale.cpu(), root=root)
                key = self._key(number, int(step))
                stored, scale = moment_from_fp32(values, self.moments, root=root, key=key, moment=k)
            state[name if scale is None else f"{name}_8bit"] = stored
            if scale is not None:
                state[f"{name}_scale"] = scale
        return state | _rest(param, saved)


def _copied(state: Tensor) -> Tensor:
    """Return a contiguous copy in host memory."""
    return state.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _rest(param: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state that completes a bf16 or fp16 parameter to fp32, from `saved` or from the parameter's value.

    A remainder or master of another dtype is ignored: torch's optimizer has cast it, and it is out of date.
    """
    if param.dtype not in _EXTRA:
        return {}
    name, dtype = _EXTRA[param.dtype]
    kept = saved.get(name)
    if isinstance(kept, Tensor) and kept.dtype == dtype and kept.shape == param.shape:
        return {name: _copied(kept)}
    if dtype == torch.int16:
        return {name: torch.zeros(param.shape, dtype=dtype)}
    return {name: param.detach().to(dtype, memory_format=torch.contiguous_format)}


def _hyper(group: dict[str, Any]) -> Hyper:
    for name in ("amsgrad", "capturable", "differentiable"):
        if group.get(name):
            raise ConfigError(f"CPUAdam does not support {name}: remove it, or use torch.optim.AdamW")
    rule: Any = "adamw" if group["decoupled_weight_decay"] else "adam"
    lr, *betas = (x.item() if isinstance(x, Tensor) else x for x in (group["lr"], *group["betas"]))
    return Hyper(rule, lr=lr, betas=tuple(betas), eps=group["eps"], weight_decay=group["weight_decay"])


def _check_groups(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ModelError or ConfigError, before any change, for a state dict that this optimizer cannot load."""
    for group in state_dict["param_groups"]:
        if "betas" not in group:
            raise ModelError(f"a group holds {', '.join(group)}: load groups of Adam, AdamW or CPUAdam")
        _hyper({"decoupled_weight_decay": False, **group})
    for state in state_dict["state"].values():
        if state and not ("step" in state and ("exp_avg" in state or "exp_avg_8bit" in state)):
            raise ModelError(f"a state holds {', '.join(state)}: load states of Adam, AdamW or CPUAdam")


def _check(param: Tensor) -> None:
    if hasattr(param, "to_local"):
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is a {type(param).__name__}: CPUAdam takes plain tensors, as "
            "param.to_local() is; use torch.optim.AdamW for it"
        )
    if not param.is_cpu:  # in a tenth of the time of `param.device`
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is on {param.device}: CPUAdam works in host memory; move the "
            "model to the CPU, or use torch.optim.AdamW"
        )
    if param.dtype not in DTYPES:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: CPUAdam takes torch.float32, torch.bfloat16 "
            "and torch.float16"
        )
    if param.layout != torch.strided:
        raise ModelError(f"a parameter of shape {tuple(param.shape)} is {param.layout}: CPUAdam takes dense ones")
