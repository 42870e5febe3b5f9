"""Where autocast may not round."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, operations on `device` run in the dtypes of their tensors.

    Meta tensors have shapes and no numbers to round, and `torch.autocast` refuses their device.
    """
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
