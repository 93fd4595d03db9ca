"""Models and runs on a stand-in of the Hub's HTTP API on loopback, and in local folders: what is sent, what is read."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml
from torch import nn

import bayesify as by
from bayesify import lab
from bayesify.lab.run_files import RunError
from bayesify.lab.runs import Run

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")

TOKEN = "hf_of_a_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories of files, made and filled as the Hub does it, for one token; `asked` has every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.private: dict[str, bool] = {}
        self.commits = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        path, body = self._begin(), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            values = json.loads(body)
            repo_id = f"ann/{values['name']}"
            self.server.files.setdefault(repo_id, {})
            private = values["private"] if "private" in values else values["visibility"] == "private"
            self.server.private.setdefault(repo_id, private)
            self._answer(200, {"url": f"{self.server.address}/{repo_id}", "name": repo_id})
        elif path == "/api/validate-yaml":
            head = json.loads(body)["content"].split("---")
            wrong = len(head) > 1 and not isinstance(yaml.safe_load(head[1]), dict)
            self._answer(400 if wrong else 200, {"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            named = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in named]
            self._answer(200, {"files": files})
        elif path.endswith("/commit/main"):
            repo_id = path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[repo_id][line["value"]["path"]] = content
            self.server.commits += 1
            url = f"{self.server.address}/{repo_id}/commit/{COMMIT}"
            self._answer(200, {"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self._answer(404, {"error": f"the stand-in has no {path}"})

    def do_GET(self) -> None:
        path = self._begin()
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/"):
            files = self.server.files.get("/".join(parts[2:4]))
            if files is None:
                self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            elif parts[4:5] == ["tree"]:
                self._answer(200, [{"type": "file", "path": name, **self._facts(files[name])} for name in files])
            else:
                siblings = [{"rfilename": name} for name in files]
                self._answer(200, {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": True})
        elif "resolve" in parts:
            content = self.server.files["/".join(parts[:2])]["/".join(parts[4:])]
            headers = {"ETag": f'"{self._facts(content)["oid"]}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, headers)
        else:
            self._answer(404, {"error": f"the stand-in has no {path}"})

    do_HEAD = do_GET

    def _facts(self, content: bytes) -> dict[str, Any]:
        return {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), "size": len(content)}

    def _begin(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, values: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(values).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The stand-in, in place of the Hub, with a cache of its own and a token."""
    with Hub() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
        running.shutdown()
        thread.join()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def trained_model() -> nn.Module:
    model = by.convert(network(), {"0": by.Rank1(3), "2": by.MeanField()})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def same_predictions(one: nn.Module, other: nn.Module) -> bool:
    x = torch.randn(5, 4)
    return torch.equal(by.predict(one, x, 6).log_probs, by.predict(other.eval(), x, 6).log_probs)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a table in a folder whose name nobody else should see."""
    folder = tmp_path_factory.mktemp("home-of-ann")
    rows = "".join(f"{i % 7},{'ab'[i % 2]},{'yes' if i % 3 else 'no'}\n" for i in range(120))
    (folder / "churn.csv").write_text(f"months,plan,stays\n{rows}")
    given = {
        "data": {"name": "table", "path": str(folder / "churn.csv"), "options": {"target": "stays"}},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "training": {"epochs": 1},
        "evaluation": {"samples": 4},
    }
    return lab.train(lab.Recipe.of(given), folder / "run", progress=False)


# Models.


def test_a_model_comes_back_as_it_went(hub: Hub, tmp_path: Path) -> None:
    model = trained_model()
    address = by.push_to_hub(model, "ann/small")
    assert address == f"{hub.address}/ann/small/commit/{COMMIT}"
    assert hub.files["ann/small"].keys() == {"model.safetensors", "README.md"}
    assert hub.commits == 1 and hub.private == {"ann/small": True}
    by.save(model, tmp_path / "here.safetensors")
    assert hub.files["ann/small"]["model.safetensors"] == (tmp_path / "here.safetensors").read_bytes()
    assert same_predictions(model, by.from_pretrained(network(), "ann/small"))


def test_a_model_that_was_downloaded_needs_no_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    by.push_to_hub(trained_model(), "ann/small")
    first = by.from_pretrained(network(), "ann/small", revision=COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert same_predictions(first.eval(), by.from_pretrained(network(), "ann/small", revision=COMMIT))
    assert not hub.asked


def test_the_card_of_a_model_says_what_it_is_and_its_example_is_true(hub: Hub) -> None:
    model = trained_model()
    by.push_to_hub(model, "ann/small")
    text = hub.files["ann/small"]["README.md"].decode()
    head = yaml.safe_load(text.split("---")[1])
    assert head["library_name"] == "bayesify" and "uncertainty" in head["tags"]
    assert "- 1 layer: `Rank1(3)`" in text and f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    code = text.split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {"network": network, "x": torch.randn(2, 4)}
    exec(code, found)
    assert found["p"].probs.shape == (2, 3)


def test_a_card_of_ones_own_and_a_public_repository(hub: Hub) -> None:
    by.push_to_hub(trained_model(), "ann/open", card="# Mine\n", private=False, token=TOKEN)
    assert hub.files["ann/open"]["README.md"] == b"# Mine\n" and hub.private == {"ann/open": False}


def test_a_local_folder_takes_the_place_of_a_repository(tmp_path: Path) -> None:
    model = trained_model()
    by.save(model, tmp_path / "model.safetensors")
    assert same_predictions(model, by.from_pretrained(network(), tmp_path))
    assert same_predictions(model, by.from_pretrained(network(), str(tmp_path)))


def test_only_the_model_is_fetched(hub: Hub, tmp_path: Path) -> None:
    by.push_to_hub(trained_model(), "ann/small")
    hub.files["ann/small"] |= {"modeling.py": b"raise SystemExit('I ran')", "pytorch_model.bin": b"pickle"}
    by.from_pretrained(network(), "ann/small")
    assert not [each for each in hub.asked if each.endswith((".py", ".bin"))]
    assert {path.name for path in (tmp_path / "cache").rglob("*.*") if path.is_symlink()} == {"model.safetensors"}


def test_a_pickled_model_is_not_read(hub: Hub) -> None:
    hub.files["ann/pickled"] = {"pytorch_model.bin": b"pickle"}
    with pytest.raises(
        by.CheckpointError, match=r"ann/pickled: has no model\.safetensors; .*other formats are not read"
    ):
        by.from_pretrained(network(), "ann/pickled")


def test_a_file_that_is_no_model_is_refused(hub: Hub) -> None:
    hub.files["ann/wrong"] = {"model.safetensors": b"\x80\x04not safetensors"}
    plain = network()
    with pytest.raises(by.CheckpointError, match="not a complete safetensors file"):
        by.from_pretrained(plain, "ann/wrong")
    assert type(plain[0]) is nn.Linear


@pytest.mark.parametrize("name", ["small", "a/b/c", "/nowhere/at/all"])
def test_a_name_that_is_no_repository(name: str) -> None:
    with pytest.raises(by.CheckpointError, match="no such folder; expected one, or a repository on the Hub such as"):
        by.from_pretrained(network(), name)


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(by.CheckpointError, match=r"ann/none: 404 .*Check the name .*`hf auth login`, or token="):
        by.from_pretrained(network(), "ann/none")


def test_a_wrong_token(hub: Hub) -> None:
    with pytest.raises(by.CheckpointError, match=r"ann/small: .*401 .*`hf auth login`") as error:
        by.push_to_hub(trained_model(), "ann/small", token="hf_wrong")
    assert "hf_wrong" not in str(error.value) and not hub.files


def test_nobody_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(by.CheckpointError, match=r"ann/small: .*Connection refused"):
        by.push_to_hub(trained_model(), "ann/small")


def test_what_is_not_bayesian_is_not_sent(hub: Hub) -> None:
    with pytest.raises(by.CheckpointError, match="has no Bayesian layer"):
        by.push_to_hub(network(), "ann/plain")
    with pytest.raises(by.BayesifyError, match=r"expected a network, got Run; for a run: lab\.push_to_hub"):
        by.push_to_hub(Run("runs/mine"), "ann/run")  # type: ignore[arg-type]
    assert not hub.asked


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: by.push_to_hub(trained_model(), "ann/a"), lambda: by.from_pretrained(network(), "ann/a")):
        with pytest.raises(by.BayesifyError, match=r"needs huggingface_hub .*pip install 'bayesify\[hub\]'"):
            call()


# Runs.


def test_a_run_comes_back_and_predicts_the_same(hub: Hub, run: Run, tmp_path: Path) -> None:
    lab.push_to_hub(run, "ann/churn")
    found = lab.from_pretrained("ann/churn", tmp_path / "mine")
    (tmp_path / "new.csv").write_text("months,plan\n3,a\n6,b\n")
    for each, out in ((run, "one.csv"), (found, "two.csv")):
        lab.predict_files(each, [tmp_path / "new.csv"], tmp_path / out)
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()
    assert found.metrics == run.metrics
    assert not [path for path in found.folder.rglob("*") if path.is_symlink()]


def test_data_logs_and_folders_of_ones_own_stay_here(hub: Hub, run: Run) -> None:
    lab.push_to_hub(run.folder, "ann/churn")
    sent = hub.files["ann/churn"]
    assert sent.keys() == {"README.md", "recipe.yaml", "run.json", "preprocessing.json", "model.safetensors"} | {
        "familiarity.safetensors",
        "metrics.json",
    }
    assert not [name for name, content in sent.items() if b"home-of-ann" in content]
    assert yaml.safe_load(sent["recipe.yaml"])["data"]["path"] == "churn.csv"


def test_the_card_of_a_run_has_its_metrics(hub: Hub, run: Run) -> None:
    lab.push_to_hub(run, "ann/churn")
    text = hub.files["ann/churn"]["README.md"].decode()
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "bayesify"
    assert f"{run.metrics['test']['nll']:.4f}" in text
    assert "lab.from_pretrained('ann/churn', 'runs/churn')" in text and "churn.csv" in text


def test_a_run_is_there_as_a_whole_or_not_at_all(hub: Hub, run: Run, tmp_path: Path) -> None:
    lab.push_to_hub(run, "ann/churn")
    del hub.files["ann/churn"]["preprocessing.json"]
    with pytest.raises(by.CheckpointError, match=r"ann/churn: has no preprocessing\.json, so lab\.push_to_hub did not"):
        lab.from_pretrained("ann/churn", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunError, match="taken: exists already"):
        lab.from_pretrained("ann/churn", tmp_path / "taken")


def test_nothing_in_a_run_from_elsewhere_runs(hub: Hub, run: Run, tmp_path: Path) -> None:
    lab.push_to_hub(run, "ann/churn")
    files, mark = hub.files["ann/churn"], tmp_path / "it-ran"
    recipe = yaml.safe_load(files["recipe.yaml"])
    recipe["model"] = {"name": "networks.py:make"}
    files["recipe.yaml"] = yaml.safe_dump(recipe).encode()
    files["networks.py"] = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef make(): ...\n".encode()
    found = lab.from_pretrained("ann/churn", tmp_path / "mine")
    assert not (found.folder / "networks.py").exists()
    with pytest.raises(by.BayesifyError, match="runs only if you trust it"):
        found.load()
    assert not mark.exists()


def test_a_folder_of_someone_else_takes_the_place_of_a_repository(run: Run, tmp_path: Path) -> None:
    found = lab.from_pretrained(run.folder, tmp_path / "mine")
    assert found.metrics == run.metrics and found.load().recipe == run.recipe
    assert not (found.folder / "metrics.csv").exists()


def test_a_run_that_has_not_finished_is_not_sent(hub: Hub, run: Run, tmp_path: Path) -> None:
    unfinished = Run.create(tmp_path / "begun", run.recipe)
    with pytest.raises(RunError, match="training has not finished"):
        lab.push_to_hub(unfinished, "ann/begun")
    assert not hub.asked


def test_what_is_no_run_is_not_sent(hub: Hub, run: Run) -> None:
    with pytest.raises(RunError, match=r"expected a run or its folder, got Trained; for a network: by\.push_to_hub"):
        lab.push_to_hub(run.load(), "ann/churn")  # type: ignore[arg-type]
    assert not hub.asked
