"""Secrets planted in an environment, and the search for them in what a run leaves behind."""

from pathlib import Path

_WORD = "planted-hush-hush"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": f"{_WORD}-1",
    "HF_TOKEN": f"hf_{_WORD}-2",
    "MLFLOW_TRACKING_PASSWORD": f"{_WORD}-3",
    "MLFLOW_TRACKING_TOKEN": f"{_WORD}-4",
    "WANDB_API_KEY": f"{_WORD}-5",
    "DATABASE_URL": f"postgresql://me:{_WORD}-6@db.example/x",
    "https_proxy": f"http://me:{_WORD}-7@proxy.example:8080",
}


def files_with_secrets(folder: Path) -> list[Path]:
    """All files below `folder` that hold one, whatever their kind."""
    return [path for path in folder.rglob("*") if path.is_file() and _WORD.encode() in path.read_bytes()]
