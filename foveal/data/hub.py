"""Data sets of the Hugging Face hub (or the mirror that HF_ENDPOINT names) and of ModelScope (USE_MODELSCOPE_HUB=1)."""

from __future__ import annotations

import os
from pathlib import Path

from foveal.data.files import EXTENSIONS
from foveal.data.folders import read_folder, rows_of
from foveal.data.rows import Rows
from foveal.errors import DataError


def uses_modelscope() -> bool:
    """Whether hub ids are ModelScope's: USE_MODELSCOPE_HUB is set to 1."""
    return os.environ.get("USE_MODELSCOPE_HUB", "0").strip().lower() in {"1", "true", "y", "yes"}


def read_hub(hub_id: str, subset: str | None, split: str | None, source: str) -> Rows:
    """Rows of a split (default `train`) of a hub data set, downloaded where the hub's own cache lacks them.

    Raises:
        DataError: there is no such data set, subset or split, or no network; or it cannot be read.
    """
    try:
        if uses_modelscope():
            return _from_modelscope(hub_id, subset, split, source)
        return _from_hugging_face(hub_id, subset, split, source)
    except DataError:
        raise
    except Exception as error:
        hub = "ModelScope" if uses_modelscope() else f"the Hugging Face hub{_mirror()}"
        raise DataError(
            f"{hub_id} is no file or folder here (looked for from {Path.cwd()}), and loading it from {hub} failed: "
            f"{type(error).__name__}: {error}. Correct the path or id, or download the data set where there is a "
            f"network and give its folder."
        ) from error


def _mirror() -> str:
    endpoint = os.environ.get("HF_ENDPOINT")
    return f" at HF_ENDPOINT={endpoint}" if endpoint else ""


def _from_hugging_face(hub_id: str, subset: str | None, split: str | None, source: str) -> Rows:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError
    from huggingface_hub import snapshot_download

    # Arrow wants one type per column in all rows and files. Where types differ, `datasets` 4 refuses them and 5 turns
    # them into JSON text, in which the answers "0123" and 123 become one. The readers of local files keep both.
    try:
        dataset = load_dataset(hub_id, subset, split=split or "train")
        if "Json(" not in str(dataset.features):
            return rows_of(dataset, source)
    except DatasetGenerationError:
        pass
    wanted = ["README.md", *(f"*{extension}" for extension in EXTENSIONS)]
    folder = snapshot_download(hub_id, repo_type="dataset", allow_patterns=wanted)
    return read_folder(Path(folder), subset, split, source)


def _from_modelscope(hub_id: str, subset: str | None, split: str | None, source: str) -> Rows:
    # Only the download is ModelScope's. Its own loader replaces parts of `datasets` and lags behind its versions.
    try:
        from modelscope import dataset_snapshot_download
    except ImportError as error:
        raise DataError(
            f"USE_MODELSCOPE_HUB is set, and reading {hub_id} from there needs the package modelscope: "
            f"`pip install modelscope`, or unset USE_MODELSCOPE_HUB."
        ) from error
    return read_folder(Path(dataset_snapshot_download(hub_id)), subset, split, source)
