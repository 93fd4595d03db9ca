"""Models on the Hugging Face Hub, as safetensors and text alone, so that nothing from a hub can run."""

import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from bayesify.errors import BayesifyError, CheckpointError
from bayesify.files.checkpoint import load, save
from bayesify.layers import bayesian_layers

Model = TypeVar("Model", bound=nn.Module)
MODEL, CARD = "model.safetensors", "README.md"
HEADER = "---\nlibrary_name: bayesify\ntags: [bayesify, bayesian-neural-network, uncertainty]\n---\n\n"
"""What the Hub reads of a model card."""


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Save a Bayesian model and a model card to a repository on the Hugging Face Hub, in one commit.

    Args:
        model: A converted network; for a run of the lab there is `lab.push_to_hub`.
        repo_id: The repository, `user/name`, which is made unless it exists.
        card: The model card, in Markdown; by default the methods and how to load the model.
        private: Whether a new repository is private.
        token: A token with the right to write; by default that of `hf auth login`.
        revision: The branch; by default `main`.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: The Hub can't be reached, or refuses.
    """
    if not isinstance(model, nn.Module):
        raise BayesifyError(f"push_to_hub: expected a network, got {type(model).__name__}; for a run: lab.push_to_hub")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / MODEL
        save(model, file)
        text = HEADER + _card(model, repo_id) if card is None else card
        return upload({MODEL: file, CARD: text.encode()}, repo_id, private=private, token=token, revision=revision)


def from_pretrained(
    model: Model, source: str | Path, *, revision: str | None = None, token: str | None = None
) -> Model:
    """Convert a fresh plain network as the one in a repository was, in place, and fill it with the saved tensors.

    >>> import bayesify as by, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> by.save(by.convert(nn.Linear(4, 3), by.Rank1(4)), folder / "model.safetensors")
    >>> by.from_pretrained(nn.Linear(4, 3), folder)
    BayesianLinear(
      in_features=4, out_features=3, bias=True, Rank1(4)
      (posterior): Posterior()
    )

    Args:
        model: A plain network of the saved one's architecture.
        source: A repository on the Hugging Face Hub, `user/name`, or a folder that has a `model.safetensors`.
        revision: A branch, tag or commit; give a commit for a model that must not change.
        token: A token with the right to read; by default that of `hf auth login`.

    Returns:
        The same network.

    Raises:
        CheckpointError: There is no such model, or one of another architecture. The network is left unchanged.
    """
    return load(model, download([MODEL], source, revision=revision, token=token) / MODEL)


def upload(
    files: Mapping[str, Path | bytes], repo_id: str, *, private: bool, token: str | None, revision: str | None
) -> str:
    """Write files to a repository in one commit; returns its address."""
    hub = _hub()
    changes = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
    with _named(repo_id):
        api = hub.HfApi(token=token, library_name="bayesify")
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        done = api.create_commit(repo_id, changes, commit_message="Upload a Bayesian model", revision=revision)
    return str(done.commit_url)


def download(names: Sequence[str], source: str | Path, *, revision: str | None, token: str | None) -> Path:
    """A folder with those of the named files that a repository has, all of one commit; or the given folder."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if os.path.isabs(folder) or str(source).count("/") != 1:
            raise CheckpointError(
                f"{source}: no such folder; expected one, or a repository on the Hub such as user/name"
            )
        with _named(str(source)):
            api = _hub().HfApi(token=token, library_name="bayesify")
            folder = Path(api.snapshot_download(str(source), revision=revision, allow_patterns=list(names)))
    if not (folder / MODEL).is_file():
        raise CheckpointError(f"{source}: has no {MODEL}; push_to_hub writes one, and other formats are not read")
    return folder


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise BayesifyError(f"the Hub needs huggingface_hub ({error}): pip install 'bayesify[hub]'") from error


@contextmanager
def _named(repo_id: str) -> Iterator[None]:
    """Let errors name the repository."""
    try:
        yield
    except BayesifyError:
        raise
    except Exception as error:  # huggingface_hub has errors of its own, and those of its HTTP library
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{repo_id}: {reason[:500]}. Check the name (user/name), the connection, and your rights: `hf auth login`, "
            "or token=…"
        ) from error


def _card(model: nn.Module, repo_id: str) -> str:
    """What the model is, and how to load it."""
    layers = bayesian_layers(model)
    methods = Counter(str(layer.method) for layer in layers.values())
    added = {id(p): p.numel() for layer in layers.values() for p in layer.posterior.parameters()}
    count = sum(p.numel() for p in model.parameters())
    lines = [
        f"# {repo_id}",
        "",
        f"A Bayesian `{type(model).__name__}` of {count:,} parameters, {sum(added.values()):,} ",
    ]
    lines[-1] += "of them in its posterior:"
    lines += ["", *(f"- {times} layer{'s' * (times > 1)}: `{method}`" for method, times in methods.items()), ""]
    use = f'model = by.from_pretrained(network(), "{repo_id}")  # a plain network of the same architecture'
    return "\n".join([*lines, "```python", "import bayesify as by", "", use, "p = by.predict(model, x)", "```", ""])
