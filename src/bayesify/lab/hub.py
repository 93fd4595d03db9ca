"""Runs on the Hugging Face Hub: what prediction needs of them, without data, logs and checkpoints, and a model card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path, PurePath
from typing import Any

import yaml

from bayesify.errors import CheckpointError
from bayesify.integrations.hub import CARD, download, upload
from bayesify.lab.model_card import hub_card
from bayesify.lab.run_files import RunError
from bayesify.lab.runs import Run
from bayesify.lab.training.loggers import TRACKED

NEEDED = ("recipe.yaml", "run.json", "preprocessing.json", "model.safetensors")
OPTIONAL = ("familiarity.safetensors", "conformal.json", "metrics.json")


def push_to_hub(
    run: Run | str | Path,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Save a run's model to a repository on the Hugging Face Hub, with its metrics and a model card, in one commit.

    Of files and folders that the recipe names, only the names are written. Data, logs and the inputs of the report stay
    here; names of columns, categories and classes do not, as prediction needs them.

    Args:
        run: A run that has finished training, or its folder.
        repo_id: The repository, `user/name`, which is made unless it exists.
        card: The model card, in Markdown; by default one from the run.
        private: Whether a new repository is private.
        token: A token with the right to write; by default that of `hf auth login`.
        revision: The branch; by default `main`.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: The Hub can't be reached, or refuses.
        RunError: The run has not finished, or is damaged.
    """
    if not isinstance(run, (Run, str, Path)):
        raise RunError(
            f"push_to_hub: expected a run or its folder, got {type(run).__name__}; for a network: by.push_to_hub"
        )
    run = run if isinstance(run, Run) else Run.open(run)
    trained = run.load()  # which looks at every file
    files: dict[str, Path | bytes] = {
        name: run.folder / name for name in (*NEEDED, *OPTIONAL) if (run.folder / name).is_file()
    }
    facts = {key: value for key, value in run.facts.items() if key != TRACKED}
    files["recipe.yaml"] = yaml.safe_dump(_without_folders(run.recipe.plain()), sort_keys=False).encode()
    files["run.json"] = json.dumps(facts, indent=1).encode()
    files[CARD] = (hub_card(run, trained, repo_id) if card is None else card).encode()
    return upload(files, repo_id, private=private, token=token, revision=revision)


def from_pretrained(
    source: str | Path,
    folder: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust: str | Path | None = None,
) -> Run:
    """Get a run from the Hugging Face Hub into a folder. Nothing in it is executed.

    Args:
        source: A repository that `push_to_hub` wrote, `user/name`, or a folder with its files.
        folder: Where to; nothing may be there yet.
        revision: A branch, tag or commit; give a commit for a model that must not change.
        token: A token with the right to read; by default that of `hf auth login`.
        trust: A Python file of yours, if the run's network is a function of it. It is never taken from a hub.

    Returns:
        The run, for `load`, `predict_files` and `bayesify predict`.

    Raises:
        CheckpointError: There is no such repository, or it has no run.
        RunError: The folder exists, or a file is damaged.
    """
    folder = Path(folder)
    if folder.exists():
        raise RunError(f"{folder}: exists already; choose another folder, or remove it to get the run again")
    found = download((*NEEDED, *OPTIONAL), source, revision=revision, token=token)
    lost = [name for name in NEEDED if not (found / name).is_file()]
    if lost:
        raise CheckpointError(
            f"{source}: has no {lost[0]}, so lab.push_to_hub did not write it; see by.from_pretrained"
        )
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir(parents=True)
    for name in (*NEEDED, *OPTIONAL):
        if (found / name).is_file():
            shutil.copyfile(found / name, part / name)  # not the links that the cache of the Hub has
    os.replace(part, folder)
    return Run.open(folder, trust=trust)


def _without_folders(values: Any) -> Any:
    """The values of a recipe with the names of files in place of their absolute paths.

    >>> _without_folders({"data": {"path": "/home/ann/churn.csv", "limit": 5}, "ood": ["/data/other", "kmnist"]})
    {'data': {'path': 'churn.csv', 'limit': 5}, 'ood': ['other', 'kmnist']}
    """
    if isinstance(values, dict):
        return {key: _without_folders(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_without_folders(value) for value in values]
    return PurePath(values).name if isinstance(values, str) and os.path.isabs(values) else values
