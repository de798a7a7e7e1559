"""The site, built once for all tests of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment)
    return folder
