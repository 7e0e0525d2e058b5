"""Which stages a layer of a model has."""

from qinfer.models.config import ModelConfig
from qinfer.models.rope import RotaryTable
from qinfer.quant.dense import DenseStages
from qinfer.quant.experts import ExpertStages
from qinfer.quant.stages import BlockStages


def block_stages(config: ModelConfig, layer: int, rotary: RotaryTable) -> BlockStages:
    """Return the stages of a decoder block.

    Args:
        config: the model's facts.
        layer: its index.
        rotary: cos and sin of the longest sample.
    """
    if config.moe is not None and config.is_sparse(layer):
        return ExpertStages(config, config.moe, layer, rotary)
    return DenseStages(config, layer, rotary)
