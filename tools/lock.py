"""Write the hashes of every file of each locked release into lock files: python tools/lock.py requirements.lock …

The versions are those that the files already name. To change one, edit its line, then run `make lock`. Hashes come from
the indexes and local folders that pip is configured with, and those of all platforms are listed, so that a lock file
works with every wheel of a release, also with a local build of it such as torch's for CPUs.
"""

import ast
import hashlib
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pip._internal.models.index import PyPI

PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s\\]+)")
HASH = "    --hash=sha256:"


class Links(HTMLParser):
    """The addresses that a page of an index links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def pip_setting(name: str) -> list[str]:
    """The values of one of pip's settings, from its files and from the environment, which goes first."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    values = {key: ast.literal_eval(value) for key, _, value in lines if key.rpartition(".")[2] == name}
    own = [value for key, value in values.items() if key.startswith(":env:")]
    return " ".join(own or values.values()).split()


def page(index: str, name: str, context: ssl.SSLContext) -> str:
    """An index's page about a project, empty if it has none."""
    address = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    if address.startswith("file:"):
        file = Path(unquote(urlparse(address).path)) / "index.html"
        return file.read_text() if file.is_file() else ""
    try:
        with urllib.request.urlopen(address, context=context, timeout=60) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise


def is_release(file: str, name: str, version: Version) -> bool:
    """Whether a file's name is that of a wheel or source distribution of the release, or of a local build of it."""
    try:
        found = parse_wheel_filename(file)[:2] if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return False
    same = found[1] == version or (version.local is None and found[1].public == version.public)
    return found[0] == canonicalize_name(name) and same


def hashes(name: str, version: str, indexes: list[str], folders: list[Path], context: ssl.SSLContext) -> list[str]:
    """The SHA-256 hashes of all files of a release."""
    found = set()
    for index in indexes:
        links = Links()
        links.feed(page(index, name, context))
        for address, fragment in map(urldefrag, links.found):
            file = unquote(urlparse(address).path.rpartition("/")[2])
            if fragment.startswith("sha256=") and is_release(file, name, Version(version)):
                found.add(fragment.removeprefix("sha256="))
    for folder in folders:
        local = [path for path in folder.iterdir() if is_release(path.name, name, Version(version))]
        found |= {hashlib.sha256(path.read_bytes()).hexdigest() for path in local}
    if not found:
        raise SystemExit(f"{name}=={version}: no index or folder that pip is configured with has this release")
    return sorted(found)


def lock(path: Path, indexes: list[str], folders: list[Path], context: ssl.SSLContext) -> None:
    """Rewrite a lock file: its comments and pins as they are, each pin with the hashes of its release."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith(HASH)]
    pins = {line: PIN.match(line) for line in lines if line and not line.startswith("#")}
    wrong = [line for line, pin in pins.items() if pin is None]
    if wrong:
        raise SystemExit(f"{path}: {wrong[0]!r}: expected a line such as numpy==2.4.6")
    with ThreadPoolExecutor(8) as pool:
        found = {
            line: pool.submit(hashes, *pin.groups(), indexes, folders, context) for line, pin in pins.items() if pin
        }
        entries = [
            f" \\\n{HASH}".join([PIN.match(line)[0], *found[line].result()]) if line in found else line
            for line in lines
        ]
    part = path.with_suffix(".part")
    part.write_text("\n".join(entries) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    cert = pip_setting("cert")
    secure = ssl.create_default_context(cafile=cert[0] if cert else None)
    where = [*(pip_setting("index-url") or [PyPI.simple_url]), *pip_setting("extra-index-url")]
    local = [Path(folder) for folder in pip_setting("find-links") if Path(folder).is_dir()]
    for given in sys.argv[1:]:
        lock(Path(given), where, local, secure)
