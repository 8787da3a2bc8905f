"""Stands in for the package deepspeed: `import deepspeed` returns the module infinity.deepspeed.

Python finds this file because `infinity run` and `python -m infinity.deepspeed` put its folder first in PYTHONPATH.
"""

import sys

try:
    from infinity.deepspeed.substitute import alias_modules
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "infinity":
        raise
    raise ModuleNotFoundError(
        f"deepspeed is replaced by infinity.deepspeed in this process, but {sys.executable} has no package infinity. "
        f"Install infinity there, or remove the folder of {__file__} from PYTHONPATH.",
        name="infinity",
    ) from error

alias_modules()
