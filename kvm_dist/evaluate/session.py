"""What is looked at between steps: held-out loss, loss by position, and what the model writes."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvm_dist.config import EvaluationConfig
from kvm_dist.data.tokenizer import Tokenizer
from kvm_dist.data.validation import ValidationBatches
from kvm_dist.evaluate.validation import ValidationResult, validate
from kvm_dist.exit_codes import NotFinite
from kvm_dist.metrics import append_line
from kvm_dist.run_directory import RunDirectory
from kvm_dist.sequence_split import SequenceSplit
from models.backbone import Backbone
from models.generate import generate
from parallel.engine.deepspeed import Engine

_log = logging.getLogger(__name__)


class Evaluation:
    """Validation on all ranks, samples on rank 0; neither draws from the random state of training."""

    def __init__(
        self,
        config: EvaluationConfig,
        engine: Engine,
        model: Backbone,
        batches: ValidationBatches,
        split: SequenceSplit,
        tokenizer: Tokenizer,
        directory: RunDirectory,
        loss_chunk: int | None = None,
    ) -> None:
        """loss_chunk: see `validate`."""
        self.config = config
        self.engine = engine
        self.model = model
        self.batches = batches
        self.split = split
        self.tokenizer = tokenizer
        self.directory = directory
        self.loss_chunk = loss_chunk

    def run(self, step: int) -> dict[str, float]:
        """Collective. Returns metrics; rank 0 also writes the position loss and the samples of `step`.

        Raises NotFinite on all ranks if the held-out loss is not finite: such weights are not saved.
        """
        self.engine.module.eval()
        metrics: dict[str, float] = {}
        if self.config.validation_sequences:
            result = validate(self.engine.module, self.batches, self.split, self.loss_chunk)
            if not math.isfinite(result.loss):
                raise NotFinite(
                    f"step {step}: the validation loss is {result.loss}; the weights are not saved. Lower "
                    "optimizer.learning_rate; the same command goes on from the last checkpoint"
                )
            metrics["validation/loss"] = result.loss
            if self._speaks:
                with _training_goes_on("position loss"):
                    self._write_position_loss(step, result)
        if self.config.sample_prompts:
            with self.engine.gathered():
                if self._speaks:
                    with _training_goes_on("samples"):
                        self._write_samples(step, self.config.sample_prompts)
        self.engine.module.train()
        return metrics

    @property
    def _speaks(self) -> bool:
        return self.split.mesh.world.rank == 0

    def _write_position_loss(self, step: int, result: ValidationResult) -> None:
        record = {"step": step, "block_tokens": result.block_tokens, "losses": result.position_losses}
        self.directory.position_loss_path.write_text(json.dumps(record) + "\n", encoding="utf-8")

    def _write_samples(self, step: int, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            text = continuation(
                self.model,
                self.tokenizer,
                prompt,
                self.config.sample_tokens,
                self.config.sample_temperature,
                torch.Generator().manual_seed(0),
                self.split.device,
            )
            append_line(self.directory.samples_path, {"step": step, "prompt": prompt, "text": text})


@contextmanager
def _training_goes_on(what: str) -> Iterator[None]:
    """A full or vanished disk costs what is looked at, not the run."""
    try:
        yield
    except OSError as error:
        _log.error("the %s of this step were not written: %s", what, error)


def continuation(
    model: Backbone,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    generator: torch.Generator,
    device: torch.device,
) -> str:
    """The text that the model puts after `prompt`."""
    prompt_ids = torch.as_tensor(tokenizer.encode(prompt).astype("int64"), device=device)
    return tokenizer.decode(generate(model, prompt_ids, tokens, temperature, generator).tolist())
