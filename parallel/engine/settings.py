"""How deepspeed is imported and configured: nothing that changes a number is left to its defaults."""

import logging
import re
import warnings
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

from parallel.config import ParallelConfig

_NEVER = 2**31 - 1


def import_deepspeed(zero_stage: int, timeout_seconds: float) -> ModuleType:
    """deepspeed without its compiled communication op, its chatter, and the versions known to lose gradients.

    The groups it makes wait `timeout_seconds`; by itself it would leave them torch's default, half an hour.
    Import it only after `join_world`, which sets what it reads from the environment.
    """
    import deepspeed
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime import bf16_optimizer

    check_version(deepspeed.__version__, zero_stage)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    bf16_optimizer.see_memory_usage = _say_nothing  # a garbage collection and prints at every parameter group
    # On a CPU it would compile an op for shared memory at start, and fail without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    TorchBackend.new_group = lambda _, ranks: dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_seconds)
    )
    module: ModuleType = deepspeed
    return module


def _say_nothing(*_: object, **__: object) -> None:
    pass


def check_version(version: str, zero_stage: int) -> None:
    """ZeRO-2 of 0.17.6 to 0.19.3 lost gradients of parameters that are used twice in one backward."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if zero_stage == 2 and (0, 17, 6) <= numbers <= (0, 19, 3):
        raise ValueError(
            f"parallel.zero_stage=2 with deepspeed {version}: versions 0.17.6 to 0.19.3 lose gradients "
            "there; install deepspeed >= 0.19.4 or use parallel.zero_stage=1"
        )


def deepspeed_settings(
    config: ParallelConfig,
    world_size: int,
    parameter_elements: int,
    gradient_clipping: float,
    accumulation: int,
) -> dict[str, Any]:
    """The whole configuration of deepspeed.

    Everything is accumulated and reduced in float32. A bucket never needs more than all parameters; with
    several sequence ranks it must hold all, since a reduction inside the backward would wait for ranks that
    wait for this one's hand-over.
    """
    bucket = parameter_elements if config.sequence > 1 else min(config.bucket_elements, parameter_elements)
    bucket += bucket % 2  # deepspeed wants an even number
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": accumulation * world_size,
        "gradient_clipping": gradient_clipping,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "bf16": {
            "enabled": config.precision == "bfloat16",
            "immediate_grad_update": False,
            "check_grad_overflow": True,
        },
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_settings(config.zero_stage, bucket),
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        # By itself it stops the device at every micro-batch, and with it messages that nobody has taken yet.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }


def _zero_settings(stage: int, bucket: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket,
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "elastic_checkpoint": False,
        "load_from_fp32_weights": True,
    }
    if stage == 3:
        settings |= {
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_model_persistence_threshold": 2**62,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    return settings
