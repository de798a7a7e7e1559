"""``ingot plan``: models by name, and what is wrong with some."""

import pytest

from tests.lab.command import invoke, plain

MODULE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

def with_example():
    return net(), torch.zeros(4, 6)

def of_size(width):
    return nn.Linear(width, 2)

def nothing():
    return 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module in the working directory, which is not on the path yet."""
    (tmp_path / "users_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


def test_a_model_of_timm_is_planned():
    result = invoke("plan", "timm:resnet18", "--structure", "auto", "--batch", "2", "--every", "5")
    assert result.exit_code == 0, result.output
    assert "layer4.1.conv2.weight" in result.stdout or "layer4.*.conv2.weight" in result.stdout
    assert "of a forward and backward pass" in result.stdout
    assert "41 by AdamW" in result.stdout or "40 by AdamW" in result.stdout
    assert max(map(len, result.stdout.splitlines())) > 120  # no line is broken


def test_a_model_of_transformers_is_planned_by_its_default_sizes():
    result = invoke("plan", "hf:gpt2", "--memory-budget", "0.6x adamw", "--batch", "1", "--input", "64")
    assert result.exit_code == 0, result.output
    assert "12 x transformer.h.*.attn.c_attn.weight  768x2304" in result.stdout
    assert "AdamW's 949.4 MiB" in result.stdout
    share = float(result.stdout.split("MiB: ")[1].split("x AdamW")[0])
    assert 0.55 < share <= 0.6


@pytest.mark.usefixtures("module")
def test_a_function_of_ones_own_is_planned():
    without, of_shape, own = (
        invoke("plan", *words).stdout
        for words in (
            ["users_models:net", "--memory-budget", "1.5"],
            ["users_models:net", "--batch", "4", "--input", "6"],
            ["users_models:with_example", "--batch", "4"],
        )
    )
    assert "give an example batch" in without
    assert "x5 " in of_shape or "5x6 " in of_shape
    assert of_shape == own != without


def test_other_optimizers_are_planned():
    result = invoke("plan", "hf:vit", "--optimizer", "kfac", "--structure", "diagonal")
    assert result.exit_code == 0, result.output
    assert "diagonal(769)" in result.stdout


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["resnet50"], "write 'timm:resnet50', 'hf:gpt2', or"),
        (["timm:resnet5O"], "timm has no such model; did you mean 'resnet50'"),
        (["hf:gpt-2"], "transformers has no such architecture.* did you mean .*'gpt2'"),
        (["no.such.module:net"], "there is no module 'no.such.module'"),
        (["users_models:nett"], "has no function 'nett'; did you mean 'net'"),
        (["users_models:of_size"], "write a function without any"),
        (["users_models:nothing"], "returned int, where a model was expected"),
        (["users_models:net", "--batch", "2"], "give --input"),
        (["users_models:net", "--input", "6"], "give --batch as well"),
        (["users_models:net", "--batch", "2", "--input", "6,5"], "is no shape: write 3x224x224"),
        (["users_models:net", "--batch", "0"], "1 or more"),
        (["users_models:net", "--batch", "2", "--input", "7"], "could not be run on its example"),
        (["users_models:net", "--memory-budget", "much"], "memory_budget must be text such as"),
        (["users_models:net", "--memory-budget", "10"], "the smallest state takes"),
        (["users_models:net", "--structure", "dens"], "did you mean 'dense'"),
        (["users_models:net", "--structure", "dense", "--memory-budget", "1.0"], "leave one of them out"),
        (["users_models:net", "--optimizer", "adam"], "one of SINGD, INGD, IKFAC, KFAC"),
    ],
)
def test_mistakes_name_the_remedy(words, remedy):
    result = invoke("plan", *words)
    assert result.exit_code == 2
    import re

    assert re.search(remedy, plain(result.stderr))
