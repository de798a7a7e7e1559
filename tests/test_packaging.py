"""What is handed out: a wheel and an sdist that need torch alone, one version, and how to cite."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import ingot

ROOT = Path(__file__).parents[1]

# Without a line of the laboratory or of the tests: the README's first block, and what a user would try next.
SMOKE = """
import sys, torch
exec(README)
assert ingot.__version__ == VERSION
assert all(torch.isfinite(p).all() for p in model.parameters())
assert optimizer.state[model[0].weight]["steps"] == 3
saved = optimizer.state_dict()
SINGD(model, lr=1e-3, structure="diagonal").load_state_dict(saved)
print(optimizer.describe(), ingot.plan(model), optimizer.diagnostics(), sep="\\n\\n")
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"numpy", "typer", "matplotlib", "sklearn", "timm"}, loaded
"""


def _readme_block() -> str:
    text = (ROOT / "README.md").read_text("utf-8")
    return "import ingot\n" + re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)


def test_the_citation_is_the_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "license"} <= set(citation)
    paper, readme = citation["preferred-citation"], (ROOT / "README.md").read_text("utf-8")
    assert [author["family-names"] for author in paper["authors"]] == [
        *("Lin", "Dangel", "Eschenhagen", "Neklyudov", "Kristiadi", "Turner", "Makhzani")
    ]
    assert paper["year"] == 2024
    assert " ".join(paper["title"].split()) in " ".join(readme.split())


def test_there_is_one_place_for_the_version():
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'dynamic = ["version"]' in settings
    assert not re.search(r"^version\s*=", settings, re.MULTILINE)
    assert "version:" not in (ROOT / "CITATION.cff").read_text("utf-8").replace("cff-version:", "")
    assert re.fullmatch(r"\d+\.\d+\.\d+", ingot.__version__)


@pytest.fixture(scope="module")
def dist(request, tmp_path_factory) -> Path:
    """Wheel and sdist: those that ``make dist`` just built, or new ones."""
    given = request.config.getoption("--built")
    if given:
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--quiet", "--outdir", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_the_package_and_needs_torch_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
        told = Parser().parsestr(archive.read(metadata).decode())
    package = ROOT / "src" / "ingot"
    sources = {
        f"ingot/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "ingot/py.typed" in sources
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert told["Version"] == ingot.__version__
    needed = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line).group() for line in needed] == ["torch"]
    assert {"lab", "docs", "dev", "bench"} <= set(told.get_all("Provides-Extra"))
    assert told["License-Expression"] == "MIT"


@pytest.mark.slow
def test_the_sdist_has_what_the_tests_need(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    for wanted in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"):
        assert wanted in names
    for folder in ("tests", "examples", "docs", "benchmarks"):
        files = {p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts}
        assert {p.relative_to(ROOT).as_posix() for p in files} <= names


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_with_torch_alone(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    install = [python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel]
    subprocess.run(install, check=True, cwd=tmp_path)
    script = f"README, VERSION = {_readme_block()!r}, {ingot.__version__!r}\n{SMOKE}"
    command = [python, "-I", "-W", "error::DeprecationWarning", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "preconditioned" in ran.stdout
    # The command is there, and says what it lacks.
    command_line = subprocess.run([environment / "bin" / "ingot"], capture_output=True, text=True)
    assert command_line.returncode
    assert "pip install 'ingot[lab]'" in command_line.stderr
