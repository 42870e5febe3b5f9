"""What a checkpoint and its run know of the training, for a model card."""

from pathlib import Path

from kvm_dist.checkpoint.load import LoadedCheckpoint
from kvm_dist.config import RunConfig
from kvm_dist.data.index import load_index
from kvm_dist.evaluate.results import EVALUATIONS, read_records
from kvm_dist.exit_codes import DataError
from kvm_dist.metrics import METRICS_NAME, read_metrics
from kvm_dist.origin import Origin, read_origin
from kvm_dist.run_directory import RunDirectory

_VALIDATION = "validation/loss"


def training_facts(checkpoint: LoadedCheckpoint, config: RunConfig) -> dict[str, str]:
    """Name -> value in words. Folders are named without the path to them: cards are published."""
    train, data, optimizer = config.train, config.data, config.optimizer
    facts = {
        "run": config.name,
        "data": _data(config),
        "tokenizer": Path(data.tokenizer).name,
        "steps": f"{checkpoint.step:,} of {train.steps:,}",
        "tokens seen": f"{int(checkpoint.state.get('tokens', 0)):,}",
        "tokens a step": f"{train.batch_sequences * data.sequence_length:,} "
        f"({train.batch_sequences} sequences of {data.sequence_length:,})",
        "optimizer": f"AdamC, learning rate {optimizer.learning_rate:g}, weight decay "
        f"{optimizer.weight_decay:g}, betas {optimizer.beta1:g} and {optimizer.beta2:g}",
        "schedule": f"{config.schedule.warmup_steps:,} steps of warm-up, then linear to "
        f"{config.schedule.final_fraction:g} of the peak",
        "precision": config.parallel.precision,
        "seed": str(config.seed),
    }
    if origin := read_origin(RunDirectory(_run_of(checkpoint))):
        facts["started from"] = _started_from(origin)
    if found := _validation_loss(checkpoint):
        loss, step = found
        facts["validation loss"] = f"{loss:.4f} nats a token" + (
            "" if step == checkpoint.step else f" (at step {step:,})"
        )
    return facts


def evaluation_facts(checkpoint: LoadedCheckpoint) -> dict[str, str]:
    """What `evaluate` measured on this checkpoint as it is: task and number -> value."""
    records = read_records(_run_of(checkpoint) / EVALUATIONS).values()
    return {
        f"{record['task']}: {name}": f"{value:.4g}"
        for record in records
        if record.get("step") == checkpoint.step and not record.get("overrides")
        for name, value in dict(record.get("metrics", {})).items()
        if isinstance(value, float | int)
    }


def _started_from(origin: Origin) -> str:
    path = Path(origin.path)
    place = f"the folder {path.name}"
    if path.parent.name == "checkpoints":
        place = f"step {origin.step:,} of the run {path.parent.parent.name}"
    return f"{place}, weights with SHA-256 {origin.weights_sha256[:16]}..."


def _run_of(checkpoint: LoadedCheckpoint) -> Path:
    return checkpoint.path.resolve().parent.parent


def _data(config: RunConfig) -> str:
    name = config.data.path.name
    try:
        tokens = load_index(config.data.path).tokens("train")
    except (DataError, OSError):
        return name
    return f"{name}, {tokens:,} tokens"


def _validation_loss(checkpoint: LoadedCheckpoint) -> tuple[float, int] | None:
    """The newest one up to the checkpoint, and its step."""
    metrics = {**checkpoint.state.get("metrics", {})}
    if _VALIDATION in metrics:
        return float(metrics[_VALIDATION]), checkpoint.step
    for line in reversed(read_metrics(_run_of(checkpoint) / METRICS_NAME)):
        if line["step"] <= checkpoint.step and _VALIDATION in line:
            return line[_VALIDATION], int(line["step"])
    return None
