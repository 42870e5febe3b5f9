"""How a run is spread over ranks. Imports no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NodeSplits = Literal["operator", "routing"]  # what ranks of a node share the work on, by heads


class FrozenConfig(BaseModel):
    """Base of every config type: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ParallelConfig(FrozenConfig):
    """A data x sequence mesh of ranks, sequence innermost, and the engine's choices."""

    data: int = Field(1, ge=1, description="data-parallel degree")
    sequence: int = Field(1, ge=1, description="sequence-parallel degree: ranks that share one sequence")
    shards: Literal["balanced", "equal"] = Field(
        "balanced", description="balanced: shards of equal modelled cost; equal: of equal length and memory"
    )
    growth_cost: float = Field(
        1.0,
        gt=0,
        description="for balanced shards: how long a FLOP of what grows along a sequence, as its state does, "
        "takes beside one of a projection; about 3 on GPUs",
    )
    truncate_gradients: bool = Field(
        False,
        description="true: states still travel over shard edges, their gradients do not; another result",
    )
    head_groups: int = Field(
        1,
        ge=1,
        description="messages in which sequence ranks hand over a state, each of some of the heads",
    )
    head_parallel: int = Field(
        1,
        ge=1,
        description="neighbouring sequence ranks that split KVM by heads; states go from node to node",
    )
    node_splits: NodeSplits = Field(
        "operator",
        description="what head_parallel ranks split: all of KVM, or only the serial part of its forward",
    )
    alternate_chain: bool = Field(
        False,
        description="true: every second micro-batch of a step begins on the last sequence rank: ranks wait "
        "half as long at ZeRO 0 and 1",
    )
    two_way_chain: bool = Field(
        False,
        description="true: micro-batches go in pairs, one from either end of the sequence ranks at the same "
        "time; ranks hardly wait, and hold two micro-batches; ZeRO 0 and 1",
    )
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
    compile_timeout_seconds: float = Field(
        1800.0, gt=0, description="longest wait for all ranks to have their kernels compiled, before any step"
    )
    threads_per_rank: int | None = Field(
        None,
        ge=1,
        description="CPU threads a rank; null: OMP_NUM_THREADS where it is set (torchrun sets 1), "
        "else cores // local ranks",
    )
    bucket_elements: int = Field(50_000_000, ge=1, description="ZeRO reduce and gather bucket, in elements")

    @property
    def world_size(self) -> int:
        return self.data * self.sequence

    @model_validator(mode="after")
    def _nodes_are_full(self) -> "ParallelConfig":
        if self.sequence % self.head_parallel:
            raise ValueError(
                f"parallel.head_parallel={self.head_parallel} does not divide "
                f"parallel.sequence={self.sequence}; every node has as many sequence ranks"
            )
        return self

    @model_validator(mode="after")
    def _two_ways_meet_nowhere(self) -> "ParallelConfig":
        if self.two_way_chain and self.alternate_chain:
            raise ValueError(
                "parallel.two_way_chain=true begins every second micro-batch on the last sequence rank, too; "
                "leave out parallel.alternate_chain"
            )
        nodes = self.sequence // self.head_parallel
        if self.two_way_chain and self.sequence > 1 and nodes % 2:
            raise ValueError(
                f"parallel.two_way_chain=true with parallel.sequence={self.sequence} and "
                f"parallel.head_parallel={self.head_parallel}: micro-batches meet in the middle of an even "
                f"number of ranks or nodes, not of {nodes}; use parallel.alternate_chain=true"
            )
        if self.two_way_chain and self.zero_stage > 1:
            raise ValueError(
                f"parallel.two_way_chain=true with parallel.zero_stage={self.zero_stage}: ranks would meet "
                "in every layer, each in another micro-batch; use parallel.zero_stage=1 or "
                "parallel.alternate_chain=true"
            )
        return self

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> "ParallelConfig":
        if self.precision == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "parallel.precision=bfloat16 with parallel.zero_stage=0 keeps no float32 master weights; "
                "use parallel.zero_stage=1 or parallel.precision=float32"
            )
        return self
