"""Hugging Face tokenizers, loaded without code of others."""

from pathlib import Path
from typing import Any

HUB_SECONDS = 5.0  # for the Hub to take a connection, and for its answer


def load_tokenizer(name_or_folder: str) -> Any:
    """The tokenizer of a folder, or of a name on the Hub or in its cache. Never runs code that comes with it.

    Raises ValueError if there is none. Asks the Hub once, and not at all for a folder or where HF_HUB_OFFLINE
    is set: a download tries many times to reach it, which a name that nobody has is not worth.
    """
    from transformers import AutoTokenizer

    missing = None if Path(name_or_folder).is_dir() else _why_not_on_the_hub(name_or_folder)
    local = Path(name_or_folder).is_dir() or missing is not None
    try:
        return AutoTokenizer.from_pretrained(name_or_folder, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # of every kind: files that others wrote, read by code of others
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        if missing is not None:
            reason = f"no such folder, nothing that loads in the Hub's cache, and {missing}"
        raise ValueError(
            f"tokenizer {name_or_folder!r} could not be loaded: {reason}; give a folder that holds a "
            "tokenizer.json, or a name on the Hugging Face Hub"
        ) from error


def _why_not_on_the_hub(name: str) -> str | None:
    """None if it is there, or if the Hub answers otherwise: what it says to a download tells more."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE forbids to ask the Hub"
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no such name, or not without the right HF_TOKEN"
    except HFValidationError as error:
        return f"no name on the Hub ({error})"
    except (HfHubHTTPError, ValueError):
        return None
    except Exception as error:  # of the HTTP library, which changes from version to version
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None
