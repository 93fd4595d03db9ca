"""The part of the metadata that is computed: PyPI shows the README, whose links lead to files of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
FILES = (
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"] + "/blob/main/"
)
RELATIVE = re.compile(r"(\]\()(?!https?://|#)")

setup(
    long_description=RELATIVE.sub(rf"\1{FILES}", (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
