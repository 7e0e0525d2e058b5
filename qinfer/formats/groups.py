"""The group that each input of a weight belongs to (act-order), checked and reduced."""

import torch

from qinfer.errors import CheckpointError
from qinfer.schemes import WeightScheme


def group_index(
    stored: torch.Tensor, scheme: WeightScheme, in_features: int, name: str
) -> torch.Tensor | None:
    """Return the group of each input as int32, or None if it is `k // group_size`.

    A negative entry counts from the last group, as in GPTQModel.

    Args:
        stored: `g_idx` of the file.
        scheme: says how many groups there are.
        in_features: inputs of the weight.
        name: of the tensor, for messages.

    Raises:
        CheckpointError: it has another length or type, or names a group that there is not.
    """
    size = scheme.group_size or in_features
    groups = scheme.num_groups(in_features)
    if tuple(stored.shape) != (in_features,):
        raise CheckpointError(f"{name} has shape {tuple(stored.shape)}, expected ({in_features},)")
    if stored.dtype not in {torch.int32, torch.int64}:
        raise CheckpointError(f"{name} is {stored.dtype}, expected int32")
    index = torch.where(stored < 0, stored + groups, stored)
    outside = stored[(index < 0) | (index >= groups)]
    if outside.numel():
        raise CheckpointError(
            f"{name} names group {int(outside[0])} although there are {groups}; "
            f"group_size {scheme.group_size or -1} may be wrong"
        )
    index = index.to(torch.int32)
    trivial = torch.arange(in_features, dtype=torch.int32, device=index.device) // size
    return None if torch.equal(index, trivial) else index
