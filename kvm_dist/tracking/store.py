"""MLflow behind the Store protocol: the only file that imports mlflow."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import requests
from mlflow import MlflowClient, entities
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_MODEL_IS_EXTERNAL

from kvm_dist.tracking.protocol import RUN_KEY_TAG, Dataset, Point, Refused, RunGone, Unavailable

_LONGEST_VALUE = 5000  # below the limits of every store for params and tags
_LONGEST_DIGEST = 36  # of a dataset; the whole one is in its profile
_ENTITIES = 100
_FINAL = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "RESOURCE_CONFLICT")
Item = TypeVar("Item")


class MlflowStore:
    """Talks to one tracking server or database."""

    def __init__(self, uri: str, artifact_location: str | None) -> None:
        with _errors():
            self._client = MlflowClient(tracking_uri=uri)
            self._client.search_experiments(max_results=1)  # makes the schema, or shows that nobody answers
        self._artifact_location = artifact_location

    def find_run(self, experiment: str, run_key: str) -> str | None:
        with _errors():
            found = self._client.search_runs(
                [self._experiment_id(experiment)], f"tags.`{RUN_KEY_TAG}` = '{run_key}'", max_results=1
            )
        return found[0].info.run_id if found else None

    def create_run(self, experiment: str, name: str, tags: dict[str, str], milliseconds: int) -> str:
        with _errors():
            run = self._client.create_run(self._experiment_id(experiment), milliseconds, tags, name)
        run_id: str = run.info.run_id
        return run_id

    def last_steps(self, run_id: str) -> dict[str, int]:
        with _errors():
            data = self._client.get_run(run_id).data
            return {metric.key: metric.step for metric in data.to_proto().metrics}

    def history(self, run_id: str, key: str) -> list[Point]:
        with _errors():
            found = self._client.get_metric_history(run_id, key)
        return [Point(key, metric.value, metric.timestamp, metric.step) for metric in found]

    def log_points(self, run_id: str, points: list[Point], model_id: str | None = None) -> None:
        metrics = [entities.Metric(p.key, p.value, p.milliseconds, p.step, model_id=model_id) for p in points]
        with _errors():
            self._client.log_batch(run_id, metrics=metrics)

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        items = [entities.RunTag(key, value[:_LONGEST_VALUE]) for key, value in tags.items()]
        self._in_batches(items, lambda batch: self._client.log_batch(run_id, tags=batch))

    def log_params(self, run_id: str, params: dict[str, str]) -> None:
        """Params cannot be changed: what a resume changed is shown as a tag `resumed.KEY`."""
        with _errors():
            known = self._client.get_run(run_id).data.params
        cut = {key: value[:_LONGEST_VALUE] for key, value in params.items()}
        fresh = [entities.Param(key, value) for key, value in cut.items() if key not in known]
        self._in_batches(fresh, lambda batch: self._client.log_batch(run_id, params=batch))
        changed = {key: value for key, value in cut.items() if known.get(key, value) != value}
        self.set_tags(run_id, {f"resumed.{key}": value for key, value in changed.items()})

    def log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        with _errors():
            self._client.log_inputs(run_id, [_dataset_input(dataset) for dataset in datasets])

    def find_or_create_model(self, run_id: str, name: str, step: int, params: dict[str, str]) -> str:
        """An external model: the store has no copy of its files. Its params are those of its first save."""
        with _errors(gone=Refused):
            run = self._client.get_run(run_id)
            where = [run.info.experiment_id]
            query = f"source_run_id = '{run_id}' AND name = '{name}'"
            found = self._client.search_logged_models(where, query, max_results=1)
            model = found[0] if found else self._create_model(run, name, params)
            model_id: str = model.model_id
            if model_id not in [output.model_id for output in run.outputs.model_outputs]:
                self._client.log_outputs(run_id, [entities.LoggedModelOutput(model_id, step)])
            self._client.finalize_logged_model(model_id, entities.LoggedModelStatus.READY)
        return model_id

    def _create_model(self, run: entities.Run, name: str, params: dict[str, str]) -> entities.LoggedModel:
        tags = {MLFLOW_MODEL_IS_EXTERNAL: "true"}
        where = run.info.experiment_id
        return self._client.create_logged_model(where, name, run.info.run_id, tags, params, "checkpoint")

    def tag_model(self, model_id: str, tags: dict[str, str]) -> None:
        with _errors(gone=Refused):
            self._client.set_logged_model_tags(model_id, tags)

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        with _errors():
            self._client.log_artifact(run_id, str(path), folder or None)

    def upload_record(self, run_id: str, record: dict[str, Any], name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, Path(name).name)
            path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            self.upload(run_id, path, str(Path(name).parent))

    def set_status(self, run_id: str, status: str, milliseconds: int | None) -> None:
        with _errors():
            if milliseconds is None:
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status, milliseconds)

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            made: str = self._client.create_experiment(name, artifact_location=self._artifact_location)
            return made
        known: str = experiment.experiment_id
        return known

    def _in_batches(self, items: list[Item], send: Callable[[list[Item]], None]) -> None:
        for start in range(0, len(items), _ENTITIES):
            with _errors():
                send(items[start : start + _ENTITIES])


def _dataset_input(dataset: Dataset) -> entities.DatasetInput:
    entity = entities.Dataset(
        name=dataset.name,
        digest=dataset.digest[:_LONGEST_DIGEST],
        source_type="local",
        source=json.dumps({"uri": dataset.source}),
        profile=json.dumps({"tokens": dataset.tokens, "sha256": dataset.digest}),
    )
    return entities.DatasetInput(entity, [entities.InputTag(MLFLOW_DATASET_CONTEXT, dataset.context)])


@contextmanager
def _errors(gone: type[Exception] = RunGone) -> Iterator[None]:
    """MLflow's errors in our three kinds. gone: what it means that something does not exist."""
    try:
        yield
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise gone(str(error)) from error
        if error.error_code in _FINAL:
            raise Refused(str(error)) from error
        raise Unavailable(str(error)) from error
    except (requests.RequestException, OSError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
