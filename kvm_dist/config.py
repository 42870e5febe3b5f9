"""The run configuration: one frozen type per top-level key. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from models.config import ModelConfig
from parallel.config import FrozenConfig, ParallelConfig


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
    batch_sequences: int = Field(64, ge=1, description="sequences of one optimizer step, over all ranks")
    accumulation: int = Field(1, ge=1, description="micro-batches of one step")
    log_every_steps: int = Field(1, ge=1)
    deterministic: bool = Field(True, description="torch.use_deterministic_algorithms")


class CheckpointConfig(FrozenConfig):
    every_steps: int = Field(500, ge=1)
    keep: int = Field(3, ge=1, description="newest checkpoints kept")


class TrackingConfig(FrozenConfig):
    """MLflow. A null uri means sqlite in the run root."""

    enabled: bool = True
    uri: str | None = Field(None, description="null: sqlite:///RUN_ROOT/mlflow.db")
    experiment: str = "kvm-dist"

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
        if "@" in rest.partition("/")[0]:
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


class SlurmConfig(FrozenConfig):
    nodes: int = Field(1, ge=1)
    partition: str | None = None
    time_minutes: int = Field(60, ge=1)


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
        if "full_attention" in self.model.layer_kinds:
            yield (
                f"model.layers={self.model.layers} with parallel.sequence={ranks}: full_attention cannot be "
                "split along the sequence yet; use parallel.sequence=1 (and parallel.data for more processes)"
            )
        tokens, block, halo = self.data.sequence_length, self.model.position_multiple, self.model.halo_tokens
        step = ranks * block
        least = -(-halo // block) * step
        if tokens % step or tokens < least:
            yield (
                f"data.sequence_length={tokens} cannot be cut into parallel.sequence={ranks} shards of whole "
                f"blocks of {block} tokens, each at least {halo} tokens (what model.layers look back); "
                f"use {_nearest_multiples(tokens, step, least)}"
            )


def _nearest_multiples(value: int, step: int, least: int = 1) -> str:
    """In words: the multiples of `step` around `value` that are `least` (itself a multiple, or 1) or more."""
    low = value // step * step
    around = [multiple for multiple in (low, low + step) if multiple >= max(least, step)]
    return " or ".join(map(str, around or [least]))
