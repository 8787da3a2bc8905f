"""Placeholders of `deepspeed.runtime.sequence_parallel.ulysses_sp`."""

from infinity.deepspeed.absent import SEQUENCE, placeholders
from infinity.deepspeed.lazy import first_of

_TILES = (
    "call the module on chunks of the sequence under torch.utils.checkpoint, and concatenate; infinity.nn.TiledLinear "
    "splits the weights"
)

__getattr__ = first_of(
    placeholders(
        __name__, SEQUENCE, ("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "UlyssesSPFwdLossBwdWithLogits")
    ),
    placeholders(
        __name__,
        _TILES,
        (
            "AutogradComputeMLP",
            "SequenceTiledCompute",
            "TiledFusedLogitsLoss",
            "TiledLoss",
            "TiledMLP",
            "sequence_tiled_compute",
        ),
    ),
)
