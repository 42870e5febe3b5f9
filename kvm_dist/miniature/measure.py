"""What a trained miniature can do: recall by load and distance, held-out loss of text."""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvm_dist.data.index import load_index
from kvm_dist.data.validation import ValidationBatches
from kvm_dist.miniature.grid import Grid, Trial
from kvm_dist.miniature.recall import FIRST_VALUE, VALUES, RecallSequences, evaluation_sequences
from kvm_dist.pretrained import Pretrained, open_pretrained
from models.backbone import Backbone
from models.loss import IGNORED_LABEL
from parallel.sequence.context import WholeSequence

TOKENS_AT_ONCE = 8192
TEXT_BLOCKS = 8
TEXT_SEQUENCES = 256


def measure_all(grid: Grid, jobs: int, done: Callable[[Trial, float], None]) -> None:
    """Write the evaluation of every trained run that lacks one, `jobs` of them at a time."""
    missing = [trial for trial in grid.trials if not grid.result_path(trial).is_file()]
    if min(jobs, len(missing)) <= 1:
        for number, trial in enumerate(missing, 1):
            measure(grid, trial)
            done(trial, number / len(missing))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measure, grid, trial): trial for trial in missing}
        try:
            for number, finished in enumerate(as_completed(waiting), 1):
                finished.result()
                done(waiting[finished], number / len(missing))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def measure(grid: Grid, trial: Trial) -> None:
    """Evaluate one trained run and write the result beside it."""
    torch.set_num_threads(1)
    trained = open_pretrained(grid.out / trial.name)
    result = {
        "task": trial.task,
        "model": trial.model,
        "seed": trial.seed,
        "step": trained.step,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        **(measure_recall(trained.model, grid) if trial.task == "recall" else measure_text(trained)),
    }
    path = grid.result_path(trial)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n", encoding="utf-8")
    partial.replace(path)


def measure_recall(model: Backbone, grid: Grid) -> dict[str, Any]:
    """`recall`: for each length, number of pairs and octave of distances, how many of how many are right."""
    cells = []
    for tokens, loads in grid.loads.items():
        for pairs in loads:
            sequences = evaluation_sequences(grid.evaluation_sequences, tokens, pairs)
            right = _right(model, sequences)
            octaves = np.log2(np.maximum(sequences.distances, 1)).astype(int)
            for octave in range(1, tokens.bit_length()):
                asked = (sequences.distances > 0) & (octaves == octave)
                if asked.any():
                    counts = {"right": int(right[asked].sum()), "asked": int(asked.sum())}
                    cells.append({"tokens": tokens, "pairs": pairs, "octave": octave, **counts})
    return {"recall": cells}


def measure_text(trained: Pretrained) -> dict[str, Any]:
    """`sequence_losses` of every held-out sequence and `position_losses` of blocks, in nats per byte."""
    data = trained.config.data
    batches = ValidationBatches(
        load_index(data.path),
        sequence_length=data.sequence_length,
        shuffle_tokens=data.shuffle_tokens,
        sequences=TEXT_SEQUENCES,
        batch_sequences=max(1, TOKENS_AT_ONCE // data.sequence_length),
    )
    losses, valid = [], []
    for batch in batches:
        with torch.no_grad():
            logits = trained.model(batch.inputs, WholeSequence())
        found = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        losses.append(found.double().numpy())
        valid.append((batch.labels != IGNORED_LABEL).numpy())
    return _text_result(np.concatenate(losses), np.concatenate(valid))


def _text_result(losses: np.ndarray, valid: np.ndarray) -> dict[str, Any]:
    """Of losses [sequences, tokens], those that are not valid being 0."""
    whole = valid.any(1)
    losses, valid = losses[whole], valid[whole]
    step = -(-losses.shape[1] // TEXT_BLOCKS)
    edges = range(0, losses.shape[1], step)
    blocks = [(losses[:, edge : edge + step].sum(), valid[:, edge : edge + step].sum()) for edge in edges]
    return {
        "sequence_losses": (losses.sum(1) / valid.sum(1)).tolist(),
        "block_tokens": step,
        "position_losses": [float(total / count) for total, count in blocks if count],
    }


@torch.no_grad()
def _right(model: Backbone, sequences: RecallSequences) -> np.ndarray:
    """Where the likeliest of all values is the next token, [sequences, tokens]."""
    rows = max(1, TOKENS_AT_ONCE // sequences.inputs.shape[1])
    parts = []
    for start in range(0, len(sequences.inputs), rows):
        logits = model(torch.from_numpy(sequences.inputs[start : start + rows]), WholeSequence())
        values = logits[:, :, FIRST_VALUE : FIRST_VALUE + VALUES]
        parts.append(FIRST_VALUE + values.argmax(-1).numpy())
    return np.concatenate(parts) == sequences.labels
