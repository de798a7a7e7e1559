"""Every recipe at its small size, on data in the real formats; the full sizes as shapes alone."""

from pathlib import Path

import pytest
import torch

from ingot.lab.loading import loader
from ingot.lab.optimizers import choose
from ingot.lab.recipes import RECIPES, Options
from ingot.lab.recipes.base import IMAGES
from ingot.lab.training import Loop, Trainer
from tests.lab import made_data

# Of torch_geometric's own making.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

CASES = [(name, data) for name, recipe in RECIPES.items() for data in (recipe.data or ("",))]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    made_data.parquet(folder, "cifar100", "img", "fine_label")
    made_data.image_folder(folder, "imagewoof")
    made_data.image_arrays(folder, "cifar10", count=16)
    made_data.image_folder(folder, "imagenet100", test="val")
    made_data.graph_arrays(folder)
    made_data.text(folder)
    return folder


def options(name: str, data_set: str, folder: Path, size: str = "tiny") -> Options:
    return Options(data_set, folder, size, 32 if data_set in IMAGES else None)


@pytest.mark.parametrize(("name", "data_set"), CASES, ids=lambda word: word or "own")
@pytest.mark.parametrize("optimizer", ["SINGD", "AdamW"])
def test_two_epochs(data, name, data_set, optimizer):
    task = RECIPES[name].task(options(name, data_set, data))
    run = Trainer(task, choose(optimizer), 0, Loop(epochs=2, batch_size=8)).train()
    assert run.state == "done"
    assert [record.epoch for record in run.records] == [0, 1, 2]
    assert all(torch.isfinite(torch.tensor(run.column("test_loss"))))
    assert run.records[-1].train_loss != run.records[1].train_loss


PAPERS_SCHEDULES = {"vgg": "step", "convmixer": "step", "gcn": "constant"}


@pytest.mark.parametrize("name", RECIPES)
def test_schedules_and_settings_are_the_papers(data, name):
    recipe = RECIPES[name]
    task = recipe.task(options(name, recipe.data[0] if recipe.data else "", data, "full"))
    assert task.training.schedule == PAPERS_SCHEDULES.get(name, "cosine")
    assert task.training.short_floats == (name != "gcn")
    if recipe.data and recipe.data[0] in IMAGES:
        assert task.training.common == {"approx": "reduce", "momentum": 0.9}
        assert task.training.decay_every == 40


# How many million parameters models have, for 10 classes and images of 32 pixels, by their papers or timm.
MILLIONS = {"vgg": (14, 15.5), "cct": (3.5, 4.3), "dhvt": (5, 7.5), "swin": (27, 28), "repvit": (4.5, 5.2)}


@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if recipe.data[:1] and recipe.data[0] in IMAGES]
)
@pytest.mark.parametrize("size", [32, 64])
def test_full_models_take_images_of_several_sizes(data, name, size):
    task = RECIPES[name].task(Options("cifar10", data, "full", size))
    with torch.device("meta"):
        model = task.model()
    x = task.batch(task.test.__getitems__([0, 1]), training=False)[0]
    assert model(x.to("meta")).shape == (2, made_data.CLASSES)
    low, high = MILLIONS.get(name, (0.1, 60))
    assert low < sum(p.numel() for p in model.parameters()) / 1e6 < high


@pytest.mark.parametrize("name", RECIPES)
def test_small_models_are_between_tiny_and_full_ones(data, name):
    data_set = "cifar10" if "cifar10" in RECIPES[name].data else ""

    def parameters(size: str) -> int:
        task = RECIPES[name].task(options(name, data_set, data, size))
        torch.manual_seed(0)
        with torch.device("meta" if size == "full" else "cpu"):
            model = task.model()
        if size == "small":
            batch = task.batch(next(iter(loader(task.test, [[0, 1]], 0))), training=False)
            assert task.objective.score(model, batch).loss.isfinite()
        return sum(p.numel() for p in model.parameters())

    tiny, small, full = map(parameters, ("tiny", "small", "full"))
    assert tiny < small <= full
    assert small < 500_000


def test_what_a_recipe_does_not_take(data):
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        RECIPES["vgg"].task(Options("cifar-100", data))
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        RECIPES["vgg"].task(Options("cifar10", data, "tinny"))
    with pytest.raises(ValueError, match="data of its own"):
        RECIPES["digits"].task(Options("mnist", data))
