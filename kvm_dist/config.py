"""The run configuration: one frozen type per top-level key. Imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from models.config import ModelConfig
from parallel.config import FrozenConfig, ParallelConfig


class DataConfig(FrozenConfig):
    """Where the tokens come from and how they are cut into sequences."""

    path: Path = Field(Path("data/corpus"), description="folder of prepared shards")
    source: str | None = Field(
        None, description="prepared on first use: a file or folder, or 'python-stdlib'; null: `path` must exist"
    )
    tokenizer: str = Field("bytes", description="bytes, rwkv-world, or a Hugging Face tokenizer folder or name")
    sequence_length: int = Field(2048, ge=1, description="tokens of a sequence")
    shuffle_tokens: int = Field(32_000_000, ge=1, description="tokens shuffled together; also what a seek reads")
    workers: int = Field(0, ge=0, description="loader processes a rank; changes no result")
    damaged_shards_allowed: int = Field(0, ge=0, description="damaged shards masked and counted before the run stops")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of documents held out at preparation")


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


class EvaluationConfig(FrozenConfig):
    every_steps: int = Field(500, ge=1)
    validation_sequences: int = Field(64, ge=0, description="0: no validation")
    sample_prompts: list[str] = []
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
    def _batch_divides(self) -> "RunConfig":
        parts = self.parallel.data * self.train.accumulation
        if self.train.batch_sequences % parts:
            low = self.train.batch_sequences // parts * parts
            wanted = " or ".join(str(n) for n in (low, low + parts) if n)
            raise ValueError(
                f"train.batch_sequences={self.train.batch_sequences} is not divisible by parallel.data x "
                f"train.accumulation = {self.parallel.data} x {self.train.accumulation}; use {wanted}"
            )
        return self
