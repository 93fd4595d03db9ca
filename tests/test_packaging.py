"""The source distribution and the wheel: built from a clean tree, whole, installed without the tree, and described."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NOT_SHIPPED = (".ci/", ".gitignore")
BUILD = "from setuptools import build_meta as b; print(b.build_{}({!r}))"

pytestmark = pytest.mark.xdist_group("packaging")


def run(*words: object, cwd: Path, **variables: str) -> str:
    """What a command prints; without the variables by which Python would find the tree or the caller's packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked() -> list[str]:
    """The files of the repository: those that git knows or would take, or in a source distribution all."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


class Built(NamedTuple):
    sdist: Path
    tree: Path
    """The unpacked source distribution."""
    wheel: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as opened:
            name = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(opened.read(name).decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel is built from the source distribution, and that from a copy of the files that git knows."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in tracked():
        (folder / "clean" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "clean" / name)
    dist = str(folder / "dist")
    run(sys.executable, "-W", "ignore", "-c", BUILD.format("sdist", dist), cwd=folder / "clean")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-W", "ignore", "-c", BUILD.format("wheel", dist), cwd=tree)
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(sdist, tree, wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, and the packages that it depends on from here, but not this tree."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth is added as it is: the .pth of an editable install in it is not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        built.wheel,
        cwd=folder,
    )
    return python


# What is in them.


def test_the_source_distribution_has_every_file_of_the_repository(built: Built) -> None:
    expected = {name for name in tracked() if not name.startswith(NOT_SHIPPED)}
    with tarfile.open(built.sdist) as opened:
        found = {member.name.partition("/")[2] for member in opened if member.isfile()}
    generated = {name for name in found if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert found - generated == expected


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        licences = [name for name in opened.namelist() if name.endswith("licenses/LICENSE")]
    assert names == {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    assert licences


# What they say.


def test_the_readme_on_pypi_has_absolute_links_to_files_that_are_there(built: Built) -> None:
    text = built.metadata.get_payload()
    assert isinstance(text, str) and built.metadata["Description-Content-Type"].startswith("text/markdown")
    links = LINK.findall(text)
    assert not [link for link in links if not link.startswith(("https://", "http://", "#"))]
    files = [link.removeprefix(f"{SOURCE}/blob/main/") for link in links if link.startswith(SOURCE)]
    assert len(files) > 30 and not [name for name in files if not (ROOT / name.split("#")[0]).exists()]


def test_the_metadata_names_the_project_and_the_pythons(built: Built) -> None:
    urls = dict(each.split(", ") for each in built.metadata.get_all("Project-URL") or ())
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(SOURCE) for address in urls.values())
    found = re.findall(r"Python :: (3\.\d+)", str(built.metadata.get_all("Classifier")))
    assert found[0] == built.metadata["Requires-Python"].removeprefix(">=") and found == ["3.11", "3.12", "3.13"]


def test_the_project_is_at_one_place() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == SOURCE
    for name in (ROOT / ".github").rglob("*.yml"):
        addresses = re.findall(r"https://github\.com/[\w.-]+/bayesify\b", name.read_text(encoding="utf-8"))
        assert set(addresses) <= {SOURCE}, name


def test_every_extra_is_in_the_metadata_and_every_install_line_names_one(built: Built) -> None:
    extras = set(built.metadata.get_all("Provides-Extra") or ())
    for name in tracked():
        if name.endswith((".md", ".py")) and name != "CHANGELOG.md":
            for given in re.findall(r"(?:bayesify|'\.)\[([a-z,]+)\]", (ROOT / name).read_text(encoding="utf-8")):
                assert set(given.split(",")) <= extras, name


def test_no_page_claims_that_the_package_is_on_pypi() -> None:
    """`pip install bayesify` would install whatever somebody else puts there under this name."""
    for name in tracked():
        if name.endswith((".md", ".yml", ".ipynb")) and name != "CHANGELOG.md":
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.findall(r"(?:pip|uv|pip3) (?:install|add) '?bayesify\b.*", text), name


def test_no_path_of_a_machine_and_no_host_of_a_registry() -> None:
    private = re.compile(
        rb"/(?:root|work|opt)/[a-z]|file:///[a-z]+/(?:pypi|simple)|(?:index-url|find-links)\s*[=:]?\s*\S*//"
    )
    wrong = []
    for name in tracked():
        content = (ROOT / name).read_bytes()
        if b"\0" not in content[:1000]:
            wrong += [f"{name}: {match[0].decode()}" for match in private.finditer(content)]
    assert not [each for each in wrong if not each.startswith(("tests/", "tools/"))]


# That they work.


def test_the_wheel_works_without_the_tree(installed: Path, tmp_path: Path) -> None:
    code = (
        "import torch, bayesify as by, importlib.resources as r; "
        "m = by.convert(torch.nn.Linear(4, 3), by.Rank1(2)); "
        "print(by.__file__, by.predict(m, torch.randn(2, 4), 3).probs.shape, "
        "(r.files('bayesify.lab.recipes') / 'scratch.yaml').is_file())"
    )
    where, *rest = run(installed, "-c", code, cwd=tmp_path).split(maxsplit=1)
    assert Path(where).is_relative_to(installed.parents[1]) and rest == ["torch.Size([2, 3]) True\n"]


@pytest.mark.slow
def test_the_command_of_the_wheel_trains(installed: Path, tmp_path: Path) -> None:
    words = ("train", "training.epochs=1", "data.limit=100", "evaluation.samples=3", "--out", "mine", "--quiet")
    run(installed.with_name("bayesify"), *words, cwd=tmp_path)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_extra_is_added_to_what_is_installed_without_asking_an_index(installed: Path, tmp_path: Path) -> None:
    """So the advice of error messages, `pip install 'bayesify[sklearn]'`, is true though bayesify is not on PyPI."""
    python = (sys.executable, "-m", "pip", "--python", installed, "install", "--no-index", "--no-cache-dir")
    assert "Requirement already satisfied: scikit-learn" in run(*python, "bayesify[sklearn]", cwd=tmp_path)


@pytest.mark.slow
def test_the_tests_of_the_source_distribution_pass(built: Built, installed: Path) -> None:
    files = ("tests/test_house.py", "tests/test_objective.py", "tests/test_conformal.py", "tests/test_lab_recipes.py")
    deselect = "not tenth_longer"  # which measures time
    run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", deselect, *files, cwd=built.tree)


# What a fork switches on.


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflows_test_every_python_that_the_metadata_names() -> None:
    text = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    (matrix,) = (job["strategy"]["matrix"] for job in text["jobs"].values() if "strategy" in job)
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", each)]
    assert matrix["python"] == pythons


def test_workflows_call_targets_of_the_makefile_and_read_only() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in workflows():
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert text["permissions"] == {"contents": "read"} or path.name == "docs.yml", path.name
        for job in text["jobs"].values():
            assert "timeout-minutes" in job, path.name
            commands = "\n".join(step.get("run", "") for step in job["steps"])
            assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets | {"docs"}, path.name


def test_hooks_run_the_locked_tools() -> None:
    text = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = text["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system" and hook["entry"].startswith(".venv/bin/"), hook


def test_issue_templates_are_forms(tmp_path: Path) -> None:
    forms = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    }
    assert forms.keys() == {"bug", "feature", "config"}
    for name in ("bug", "feature"):
        assert {"name", "description", "body"} <= forms[name].keys()
        fields = [each for each in forms[name]["body"] if each["type"] != "markdown"]
        assert all({"label"} <= each["attributes"].keys() for each in fields)
        assert len({each["id"] for each in fields}) == len(fields)
