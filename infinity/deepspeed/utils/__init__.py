"""`deepspeed.utils`: states of single parameters, leaf modules, logging."""

from infinity.deepspeed.comm import is_initialized as is_initialized
from infinity.deepspeed.lazy import submodules
from infinity.deepspeed.runtime.dataloader import RepeatingLoader as RepeatingLoader
from infinity.deepspeed.utils.logging import (
    log_dist as log_dist,
    logger as logger,
    set_log_level_from_string as set_log_level_from_string,
)
from infinity.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param as safe_get_full_fp32_param,
    safe_get_full_grad as safe_get_full_grad,
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
    safe_get_local_fp32_param as safe_get_local_fp32_param,
    safe_get_local_grad as safe_get_local_grad,
    safe_get_local_optimizer_state as safe_get_local_optimizer_state,
    safe_set_full_fp32_param as safe_set_full_fp32_param,
    safe_set_full_grad as safe_set_full_grad,
    safe_set_full_optimizer_state as safe_set_full_optimizer_state,
    safe_set_local_fp32_param as safe_set_local_fp32_param,
    safe_set_local_grad as safe_set_local_grad,
    safe_set_local_optimizer_state as safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
)
from infinity.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules as get_z3_leaf_modules,
    set_z3_leaf_module as set_z3_leaf_module,
    set_z3_leaf_modules as set_z3_leaf_modules,
    set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules as unset_z3_leaf_modules,
    z3_leaf_module as z3_leaf_module,
    z3_leaf_parameter as z3_leaf_parameter,
)

__getattr__ = submodules(__name__, "groups", "torch", "zero_to_fp32")
