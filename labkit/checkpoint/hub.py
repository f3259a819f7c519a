"""Models from the Hugging Face hub: safetensors and JSON only, each failure in words."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.checkpoint.cache import disk_full, is_disk_full, is_offline

WANTED = ["*.safetensors", "*.json", "*.jinja"]
NOT_WANTED = ["consolidated*", "original/*", "onnx/*", "*/*", "*training_args*"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``owner/model``."""
    return _ID.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors"))


def fetch_from_hub(model_id: str) -> Path:
    """The local folder of a hub model, fetched when it is not there yet (the hub's own cache keeps it).

    Raises ConnectionError without a network, PermissionError for a gated model, ValueError for an unknown one,
    OSError (ENOSPC) for a full disk.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            model_id, allow_patterns=WANTED, ignore_patterns=NOT_WANTED, local_files_only=is_offline()
        )
        return Path(str(folder))
    except GatedRepoError as error:
        raise PermissionError(
            f"{model_id} is gated: accept its terms on its page, then log in once with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no model {model_id!r} (or it is private: `hf auth login`). labkit.models() lists names."
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{model_id!r} is not a hub id: it must read owner/model.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise ConnectionError(_unreachable(model_id)) from error
    except OSError as error:
        if is_disk_full(error):
            import shutil

            from huggingface_hub import constants

            folder = Path(constants.HF_HUB_CACHE)
            raise disk_full(folder, 0, shutil.disk_usage(folder).free) from error
        raise ConnectionError(_unreachable(model_id)) from error
    except Exception as error:  # the hub's HTTP client has changed: know its errors by their module
        if type(error).__module__.split(".")[0] in ("httpx", "httpcore", "requests", "urllib3"):
            raise ConnectionError(_unreachable(model_id)) from error
        raise


def _unreachable(model_id: str) -> str:
    why = "labkit is set to stay offline" if is_offline() else "the hub cannot be reached"
    return (
        f"{model_id} is not in the local cache and {why}. Bring it by hand: on a machine with a network run "
        f"`hf download {model_id}`, copy the folder here, and load it by its path; or use the default model."
    )
