"""Which runs the report is made of. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvm_dist.attempts import read_attempts
from kvm_dist.data.documents import PYTHON_STDLIB
from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import load_config
from kvm_dist.miniature.recall import SEQUENCES_PER_DOCUMENT

CONFIGS = Path(__file__).parents[2] / "configs" / "miniature"
FAMILIES = ("full-attention", "kvm-sqrt", "kvm-rwkv7", "kvm-fixed", "rwkv7", "bswa")
ABLATED = "kvm-sqrt"
FIXED_SLOTS = 16  # of kvm-fixed
ABLATIONS = ("no-sink", "no-temperatures", "no-merge-gate", "no-value-radius")

Task = Literal["recall", "text"]


@dataclass(frozen=True)
class CampaignSize:
    """steps: None as in the configuration files; seeds: of the recall task."""

    recall_steps: int | None = None
    text_steps: int | None = None
    seeds: int = 3
    ablation_seeds: int = 1


@dataclass(frozen=True)
class Trial:
    """One training run: a model on a task from one seed."""

    task: Task
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.model}-seed{self.seed}"

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.task}-{self.model}.yaml"


@dataclass(frozen=True)
class Grid:
    """All runs under the folder `out`, and what is asked of the trained models.

    training_loads: pairs and how often each is seen, of equal shares of the training sequences. loads: tokens
    -> numbers of pairs, of the recall evaluation; the first is the training length.
    """

    out: Path
    trials: tuple[Trial, ...]
    training_sequences: int
    training_loads: tuple[tuple[int, int], ...]
    loads: dict[int, tuple[int, ...]]
    evaluation_sequences: int
    text_source: str = PYTHON_STDLIB
    overrides: dict[Task, tuple[str, ...]] = field(default_factory=dict)

    @property
    def recall_documents(self) -> Path:
        """The training sequences of the recall task, from which shards are prepared."""
        return self.out / "data" / f"recall-{self.training_sequences}-sequences"

    def overrides_of(self, trial: Trial) -> tuple[str, ...]:
        """What a run changes in its configuration file: places, the seed, and what the grid asks for."""
        recall = trial.task == "recall"
        data = f"recall-{self.training_sequences}" if recall else "text"
        source = self.recall_documents if recall else self.text_source
        return (
            f"name={trial.name}",
            f"run_root={self.out}",
            f"seed={trial.seed}",
            f"data.path={self.out / 'data' / data}",
            f"data.source={source}",
            *self.overrides.get(trial.task, ()),
        )

    def result_path(self, trial: Trial) -> Path:
        """Where the evaluation of a run is kept."""
        return self.out / trial.name / "evaluations" / f"miniature-{trial.task}.json"

    def models(self, task: Task) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trial.model for trial in self.trials if trial.task == task))

    def seeds(self, task: Task, model: str) -> tuple[int, ...]:
        return tuple(trial.seed for trial in self.trials if (trial.task, trial.model) == (task, model))


def full_grid(out: Path, only: Sequence[str] = (), size: CampaignSize | None = None) -> Grid:
    """Every family on recall and text, every ablation on recall. `only`: these models."""
    size = size or CampaignSize()
    models = chosen(only, (*FAMILIES, *ABLATIONS))
    families = [model for model in models if model in FAMILIES]
    seeds = {model: size.seeds if model in FAMILIES else size.ablation_seeds for model in models}
    recall = [
        Trial("recall", m, seed) for seed in range(max(seeds.values())) for m in models if seed < seeds[m]
    ]
    train = load_config(CONFIGS / "recall.yaml").config.train
    steps: dict[Task, int | None] = {"recall": size.recall_steps, "text": size.text_steps}
    return Grid(
        out,
        (*recall, *(Trial("text", model, 0) for model in families)),
        training_sequences=_enough((size.recall_steps or train.steps) * train.batch_sequences),
        training_loads=((2, 60), (6, 20), (20, 6), (60, 2), (32, 2), (16, 2)),
        loads={256: (8, 16, 32, 62), 512: (8, 16, 32, 62), 1024: (8, 16, 32, 62)},
        evaluation_sequences=64,
        overrides={task: (f"train.steps={count}",) for task, count in steps.items() if count},
    )


def training_seconds(run: Path) -> float:
    """From the start to the end of a run, over its attempts."""
    return sum(a.ended - a.started for a in read_attempts(run) if a.ended is not None)


def _enough(consumed: int) -> int:
    """Sequences to write, in whole documents, so that none of those that are not held out is seen twice."""
    return -(-consumed * 10 // (9 * SEQUENCES_PER_DOCUMENT)) * SEQUENCES_PER_DOCUMENT


def quick_grid(out: Path, only: Sequence[str] = ()) -> Grid:
    """A few steps of one model or of those in `only`: shows that all parts work and says nothing else."""
    models = chosen(only, ("kvm-sqrt",))
    short = ("train.steps=4", "train.batch_sequences=4", "evaluation.validation_sequences=2")
    return Grid(
        out,
        (
            *(Trial("recall", model, 0) for model in models),
            *(Trial("text", model, 0) for model in models if model in FAMILIES),
        ),
        training_sequences=512,
        training_loads=((2, 60), (60, 2)),
        loads={256: (8, 62), 512: (62,)},
        evaluation_sequences=4,
        text_source=str(Path(json.__file__).parent),
        overrides={"recall": short, "text": short},
    )


def chosen(only: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """The models of `only` in the order of the report, with what an ablation is compared to; `default` if it
    is empty."""
    known = (*FAMILIES, *ABLATIONS)
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"miniature --only {unknown[0]}: no such model; there are {', '.join(known)}")
    wanted = set(only or default)
    if wanted & set(ABLATIONS):
        wanted.add(ABLATED)
    return tuple(model for model in known if model in wanted)
