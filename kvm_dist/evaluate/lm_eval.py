"""`lm-eval:TASK[,TASK]`: tasks of lm-evaluation-harness on data that is on this machine."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from kvm_dist.evaluate.likelihood import TextModel, writing_of
from kvm_dist.evaluate.tasks import Options, Outcome, Watch
from kvm_dist.exit_codes import ConfigError, DataError
from kvm_dist.pretrained import Pretrained


class HarnessModel(LM):
    """The harness's interface over a `TextModel`. asked: all tasks were set up, and the model is in use."""

    def __init__(self, text_model: TextModel) -> None:
        super().__init__()
        self._text_model = text_model
        self.asked = False

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.asked = True
        return self._text_model.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        self.asked = True
        return self._text_model.document_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.asked = True
        return self._text_model.write([writing_of(*request.args) for request in requests])


def evaluate(opened: Pretrained, options: Options, watch: Watch) -> Outcome:
    """Contexts of any length are read whole, or their last --tokens tokens."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = None if options.tasks_dir is None else str(options.tasks_dir)
    manager = TaskManager(include_path=folder)
    names = _known(options, manager)
    longest = options.one_length(0) or None
    text_model = TextModel(opened.model, opened.tokenizer, watch, longest, options.seed)
    model = HarnessModel(text_model)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=options.shots,
            limit=options.limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except OSError as error:
        raise DataError(
            f"lm-eval {', '.join(names)}: data is not on this machine: {type(error).__name__}: {error}. Load "
            "it once where there is network into the cache that HF_HOME names and bring that here, or give "
            "--tasks-dir DIR with task files that name local data files"
        ) from error
    except Exception as error:
        if model.asked:
            raise
        raise ConfigError(
            f"lm-eval {', '.join(names)}: cannot be set up: {type(error).__name__}: {error}; mend the task's "
            "file, or what it says of its data"
        ) from error
    scores = {name: _numbers(values) for name, values in found["results"].items()}
    return Outcome(
        metrics={f"{name}/{metric}": value for name, own in scores.items() for metric, value in own.items()},
        details={"results": found["results"], "samples": found.get("n-samples", {})},
        settings={
            "tasks": names,
            "shots": found.get("n-shot", {}),
            "versions": found.get("versions", {}),
            "limit": options.limit,
            "longest_context": longest,
            "seed": options.seed,
        },
        columns=("task", "metric", "value"),
        rows=[
            (name, metric, f"{value:.5g}") for name, own in scores.items() for metric, value in own.items()
        ],
    )


def _known(options: Options, manager: TaskManager) -> list[str]:
    """The names asked for. Raises ConfigError for one that neither the harness nor --tasks-dir knows."""
    names = [name for name in options.argument.split(",") if name]
    if not names:
        raise ConfigError(
            "--task lm-eval: which task? Name one or more, such as --task lm-eval:lambada_openai"
        )
    if options.tasks_dir is not None and not options.tasks_dir.is_dir():
        raise ConfigError(f"--tasks-dir {options.tasks_dir}: no such folder; give one with task files (YAML)")
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"--task lm-eval:{name}: the harness has no such task{meant}; own ones lie in --tasks-dir"
            )
    return names


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """`acc,none` -> acc; other filters stay in the name; standard errors and words are left out."""
    found = {}
    for key, value in values.items():
        metric, _, rule = key.partition(",")
        if isinstance(value, int | float) and metric != "sample_len" and not metric.endswith("_stderr"):
            found[metric if rule in ("", "none") else f"{metric} {rule}"] = float(value)
    return found
