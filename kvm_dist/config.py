"""The run configuration: one frozen type per top-level key. Imports no torch."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from kvm_dist.slurm_config import SlurmConfig
from models.config import ModelConfig
from models.sequence_shards import SequenceShards, sequence_shards, shards_problem
from parallel.config import FrozenConfig, ParallelConfig

_SECRET_IN_QUERY = re.compile(r"[?&][^=&]*(password|passwd|pwd|token|secret|api_?key)[^=&]*=", re.IGNORECASE)


class DataConfig(FrozenConfig):
    """Where the tokens come from and how they are cut into sequences."""

    path: Path = Field(Path("data/corpus"), description="folder of prepared shards")
    source: str | None = Field(
        None,
        description="prepared on first use: a file or folder, or 'python-stdlib'; null: `path` must exist",
    )
    tokenizer: str = Field(
        "bytes", description="bytes, rwkv-world, or a Hugging Face tokenizer folder or name"
    )
    sequence_length: int = Field(2048, ge=1, description="tokens of a sequence")
    shuffle_tokens: int = Field(
        32_000_000, ge=1, description="tokens shuffled together; also what a seek reads"
    )
    workers: int = Field(0, ge=0, description="loader processes a rank; changes no result")
    damaged_shards_allowed: int = Field(
        0, ge=0, description="damaged shards masked and counted before the run stops"
    )
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of documents held out at preparation"
    )


class OptimizerConfig(FrozenConfig):
    """AdamC: AdamW whose decay is scaled by learning_rate(t) / peak."""

    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.2, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    gradient_clipping: float = Field(1.0, ge=0, description="largest gradient norm; 0: off")


class ScheduleConfig(FrozenConfig):
    """Linear warm-up, then linear decay to `final_fraction` of the peak at the last step."""

    warmup_steps: int = Field(200, ge=0)
    final_fraction: float = Field(0.0, ge=0, le=1)


class TrainConfig(FrozenConfig):
    """How long and how much at a time."""

    steps: int = Field(6000, ge=1)
    start_from: Path | None = Field(
        None,
        description="checkpoint, run or Hugging Face folder whose weights a new run starts with; null: none",
    )
    start_from_allows: list[str] = Field(
        default=[],
        description="model keys that may differ from those of start_from though it changes what weights mean",
    )
    batch_sequences: int = Field(64, ge=1, description="sequences of one optimizer step, over all ranks")
    accumulation: int = Field(1, ge=1, description="micro-batches of one step")
    loss_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens of a rank whose logits are formed at a time, once more in the backward, for long "
        "sequences and large vocabularies; null: all of a micro-batch",
    )
    log_every_steps: int = Field(1, ge=1)
    deterministic: bool = Field(True, description="torch.use_deterministic_algorithms")
    not_finite: Literal["halt", "skip", "rollback"] = Field(
        "halt",
        description="a loss or gradient that is not finite ends the run, costs its batch only, or sends the "
        "run back to its newest checkpoint and on behind the batch",
    )
    not_finite_allowed: int = Field(
        3, ge=0, description="batches to skip and times to go back, together, before the run ends after all"
    )
    loss_spike: Literal["ignore", "halt", "skip", "rollback"] = Field(
        "ignore", description="the same for a loss far above those before it, before its step is applied"
    )
    loss_spike_deviations: float = Field(
        10.0, gt=0, description="how far: median absolute deviations above the median of the last losses"
    )
    loss_spike_window: int = Field(50, ge=4, description="how many of the last losses; fewer judge nothing")


class CheckpointConfig(FrozenConfig):
    every_steps: int = Field(500, ge=1)
    keep: int = Field(3, ge=1, description="newest checkpoints kept")
    asynchronous: bool = Field(
        True, description="written beside the steps, from a copy in memory; a run's last save never is"
    )


class TrackingConfig(FrozenConfig):
    """MLflow. A null uri means sqlite in the run root."""

    enabled: bool = True
    uri: str | None = Field(None, description="null: sqlite:///RUN_ROOT/mlflow.db")
    experiment: str = "kvm-dist"
    system_metrics_seconds: float = Field(
        30.0, ge=0, description="how often each node's CPU, memory, disk, network and GPUs are read; 0: never"
    )

    @field_validator("uri")
    @classmethod
    def _uri_is_a_store_without_secrets(cls, uri: str | None) -> str | None:
        if uri is None:
            return uri
        scheme, separator, rest = uri.partition("://")
        if not separator or scheme == "file":
            raise ValueError(
                "tracking.uri must be a database or a server: MLflow keeps no folders any more; "
                "use sqlite:///PATH/mlflow.db or http://HOST:PORT"
            )
        if "@" in rest.partition("/")[0] or _SECRET_IN_QUERY.search(rest):
            raise ValueError(
                "tracking.uri holds a user name or password, which would be stored with the run; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) instead"
            )
        return uri


class EvaluationConfig(FrozenConfig):
    every_steps: int = Field(500, ge=1)
    validation_sequences: int = Field(64, ge=0, description="0: no validation")
    sample_prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="texts to continue at every evaluation"
    )
    sample_tokens: int = Field(128, ge=1)
    sample_temperature: float = Field(0.8, ge=0, description="0: greedy")


class RunConfig(FrozenConfig):
    """Everything a run depends on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    run_root: Path = Path("runs")
    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    slurm: SlurmConfig = SlurmConfig()

    @property
    def run_directory(self) -> Path:
        return self.run_root / self.name

    @property
    def _swaps_heads(self) -> bool:
        """Whether layers meet all sequence ranks: only keys have gradients that go from rank to rank."""
        by_heads = any(self.model.layer_config(kind).reads_by_heads for kind in self.model.layer_kinds)
        divided = self.model.num_heads % self.parallel.sequence == 0
        return by_heads and divided and not self.parallel.truncate_gradients

    @property
    def shards(self) -> SequenceShards:
        """What each sequence rank holds of a sequence."""
        return sequence_shards(
            self.model,
            self.data.sequence_length,
            self.parallel.sequence,
            balanced=self.parallel.shards == "balanced",
            growth_cost=self.parallel.growth_cost,
            node_ranks=self.parallel.head_parallel if self.parallel.node_splits == "operator" else 1,
        )

    @property
    def tracking_uri(self) -> str:
        return self.tracking.uri or f"sqlite:///{self.run_root / 'mlflow.db'}"

    @model_validator(mode="after")
    def _keys_agree(self) -> "RunConfig":
        problems = [*self._batch_problems(), *self._sequence_problems()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _batch_problems(self) -> Iterator[str]:
        parts = self.parallel.data * self.train.accumulation
        if self.train.batch_sequences % parts:
            yield (
                f"train.batch_sequences={self.train.batch_sequences} is not divisible by parallel.data x "
                f"train.accumulation = {self.parallel.data} x {self.train.accumulation}; use "
                f"{_nearest_multiples(self.train.batch_sequences, parts)}"
            )

    def _sequence_problems(self) -> Iterator[str]:
        ranks = self.parallel.sequence
        if ranks == 1:
            return
        if problem := shards_problem(self.model, self.data.sequence_length, ranks):
            yield problem
        heads, key = self.model.num_heads, "model.num_heads"
        if "kvm" in self.model.layers and self.model.kvm.kv_heads is not None:
            heads, key = self.model.kvm.kv_heads, "model.kvm.kv_heads"
        for name in ("head_groups", "head_parallel"):
            if (groups := getattr(self.parallel, name)) > heads:
                yield (
                    f"parallel.{name}={groups} is more than {key}={heads}: "
                    "every group holds at least one head"
                )
        if self.parallel.two_way_chain and self._swaps_heads:
            yield (
                "parallel.two_way_chain=true with full_attention: its "
                f"model.num_heads={self.model.num_heads} are swapped among all parallel.sequence={ranks} "
                "ranks, which would be in different micro-batches; use parallel.alternate_chain=true"
            )
        if self.parallel.two_way_chain and heads % self.parallel.head_parallel:
            yield (
                f"parallel.two_way_chain=true with parallel.head_parallel={self.parallel.head_parallel}: "
                f"wants as many of {key}={heads} on every rank; use parallel.alternate_chain=true"
            )
        together = self.parallel.head_groups * self.parallel.head_parallel
        if self.parallel.node_splits == "operator" and self.parallel.head_parallel <= heads < together:
            yield (
                f"parallel.head_groups={self.parallel.head_groups} is more than the heads of one "
                f"of parallel.head_parallel={self.parallel.head_parallel} ranks that share {key}={heads}; "
                "lower one of them"
            )


def _nearest_multiples(value: int, step: int) -> str:
    """In words: the multiples of `step` around `value`."""
    low = value // step * step
    return " or ".join(str(multiple) for multiple in (low, low + step) if multiple)
