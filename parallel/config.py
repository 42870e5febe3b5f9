"""How a run is spread over ranks. Imports no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FrozenConfig(BaseModel):
    """Base of every config type: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ParallelConfig(FrozenConfig):
    """A data x sequence mesh of ranks, sequence innermost, and the engine's choices."""

    data: int = Field(1, ge=1, description="data-parallel degree")
    sequence: int = Field(1, ge=1, description="sequence-parallel degree: ranks that share one sequence")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage over all ranks")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of weights in the forward"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="auto: nccl (RCCL on AMD) on GPUs, else gloo"
    )
    timeout_seconds: float = Field(600.0, gt=0, description="longest wait for a collective or a neighbour")
    start_timeout_seconds: float = Field(
        30.0, gt=0, description="longest wait for all ranks to appear at start"
    )
    threads_per_rank: int | None = Field(
        None, ge=1, description="CPU threads a rank; null: cores // local ranks"
    )
    bucket_elements: int = Field(50_000_000, ge=1, description="ZeRO reduce and gather bucket, in elements")

    @property
    def world_size(self) -> int:
        return self.data * self.sequence

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> "ParallelConfig":
        if self.precision == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "parallel.precision=bfloat16 with parallel.zero_stage=0 keeps no float32 master weights; "
                "use parallel.zero_stage=1 or parallel.precision=float32"
            )
        return self
