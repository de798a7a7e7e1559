"""Data sets in all the formats in which they come, and what is said where there are none."""

import numpy as np
import pytest
import torch

from ingot.lab.data.augment import MEAN, STD, CropAndFlip, Normalized
from ingot.lab.data.graph import load_cora
from ingot.lab.data.images import SOURCES, Decoded, _resized, load_images
from ingot.lab.data.places import VARIABLE, MissingDataError, data_dir
from ingot.lab.data.text import load_text
from tests.lab import made_data
from tests.lab.made_data import CLASSES

# Of torch_geometric's own making.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def contents(images, part="train"):
    """Images and labels of a loaded set, sorted by label and brightness so that order does not matter."""
    data = getattr(images, part)
    x, y = data.__getitems__(range(len(data)))
    order = sorted(range(len(y)), key=lambda i: (int(y[i]), x[i].float().mean().item()))
    return x[order], y[order]


FORMATS = {
    "arrays": lambda folder, source: made_data.image_arrays(folder, source.name, count=16),
    "arrays with a size in the name": lambda folder, source: made_data.image_arrays(
        folder, f"{source.name}_32px", count=16
    ),
    "folder": lambda folder, source: made_data.image_folder(folder, source.name),
    "folder with val": lambda folder, source: made_data.image_folder(folder, source.name, test="val"),
    "parquet": lambda folder, source: made_data.parquet(
        folder, source.name, source.image, source.label, test=source.test
    ),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_same_pictures(tmp_path, name, form):
    FORMATS[form](tmp_path, SOURCES[name])
    images = load_images(SOURCES[name], tmp_path, 32)
    assert (images.classes, images.size) == (CLASSES, 32)
    assert (len(images.train), len(images.test)) == (16, 8)
    x, y = contents(images)
    expected, labels = made_data.pictures(16, 32)
    assert x.dtype == torch.uint8
    assert x.shape == (16, 3, 32, 32)
    torch.testing.assert_close(y, torch.from_numpy(np.sort(labels)))
    for label in range(CLASSES):
        mine = {picture.numpy().tobytes() for picture in x[y == label]}
        assert mine == {p.transpose(2, 0, 1).tobytes() for p in expected[labels == label]}


def test_images_are_resized_and_cut_to_squares(tmp_path):
    made_data.image_folder(tmp_path, "imagewoof", size=48)
    images = load_images(SOURCES["imagewoof"], tmp_path, 24)
    x, y = contents(images)
    assert x.shape == (16, 3, 24, 24)
    brightness = x.float().mean((1, 2, 3))
    torch.testing.assert_close(brightness, 19.5 + 50 * y, rtol=0, atol=3)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_the_middle_of_what_is_not_square(shape):
    x = torch.zeros(1, 3, *shape, dtype=torch.uint8)
    top, left = (shape[0] - 6) // 2, (shape[1] - 6) // 2
    x[..., top : top + 6, left : left + 6] = 100
    assert (_resized(x, 6) == 100).all()
    assert (_resized(x, 3) == 100).all()


def test_large_sets_are_decoded_when_asked_for(tmp_path, monkeypatch):
    made_data.image_folder(tmp_path, "imagenet100")
    kept = load_images(SOURCES["imagenet100"], tmp_path, 16)
    monkeypatch.setattr("ingot.lab.data.images.IN_MEMORY", 10)
    images = load_images(SOURCES["imagenet100"], tmp_path, 16)
    assert isinstance(images.train, Decoded)
    for found, expected in zip(contents(images), contents(kept), strict=True):
        torch.testing.assert_close(found, expected)
    x, label = images.train[3]
    torch.testing.assert_close(x, images.train.__getitems__([3])[0][0])
    assert label == images.train.__getitems__([3])[1][0]


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x_train": np.zeros((2, 8, 8, 3), np.uint8)}, "no y_train, x_test, y_test"),
        (
            {k: np.zeros((2, 8, 8), np.uint8) for k in ("x_train", "x_test", "y_train", "y_test")},
            r"\[n, size",
        ),
    ],
)
def test_arrays_that_are_no_images(tmp_path, arrays, complaint):
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(MissingDataError, match=complaint):
        load_images(SOURCES["cifar10"], tmp_path)


def test_arrays_with_objects_are_not_unpickled(tmp_path):
    np.savez(
        tmp_path / "cifar10.npz",
        **{k: np.array([{}], object) for k in ("x_train", "y_train", "x_test", "y_test")},
    )
    with pytest.raises(ValueError, match="allow_pickle"):
        load_images(SOURCES["cifar10"], tmp_path)


@pytest.mark.parametrize("name", SOURCES)
def test_missing_images_name_the_command(tmp_path, name, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(MissingDataError) as caught:
        load_images(SOURCES[name], tmp_path)
    said = str(caught.value)
    assert f"hf download {SOURCES[name].hub} --repo-type dataset" in said
    assert "--data-dir" in said
    assert VARIABLE in said
    assert "no network" in said


def test_folder_that_is_damaged_says_so(tmp_path):
    place = tmp_path / "cifar100"
    place.mkdir()
    (place / "train-0.parquet").write_bytes(b"nothing")
    with pytest.raises(MissingDataError, match="cannot be read from"):
        load_images(SOURCES["cifar100"], tmp_path)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    assert data_dir(None) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert data_dir(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert data_dir(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(MissingDataError, match="no folder"):
        data_dir(tmp_path / "missing")


# --- On the device ----------------------------------------------------------------------------------------


def test_crops_are_shifted_pictures_some_of_them_mirrored():
    torch.manual_seed(0)
    size, margin = 16, 2
    one = torch.randint(1, 255, (3, size, size), dtype=torch.uint8)
    found = CropAndFlip()(one.expand(200, -1, -1, -1))
    assert found.shape == (200, 3, size, size)
    assert found.dtype == torch.uint8
    padded = torch.nn.functional.pad(one, (margin,) * 4)
    possible = {}
    for top in range(2 * margin + 1):
        for left in range(2 * margin + 1):
            crop = padded[:, top : top + size, left : left + size]
            possible[crop.contiguous().numpy().tobytes()] = (top, left, False)
            possible[crop.flip(2).contiguous().numpy().tobytes()] = (top, left, True)
    seen = {possible[picture.contiguous().numpy().tobytes()] for picture in found}
    assert len(seen) > 35  # of fifty
    assert 70 < sum(possible[p.contiguous().numpy().tobytes()][2] for p in found) < 130


def test_normal_numbers():
    x = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    found = Normalized()(x)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    torch.testing.assert_close(found[0, :, 0, 0], -mean / std)
    torch.testing.assert_close(found[1, :, 0, 0], (1 - mean) / std)
    assert Normalized(8)(x).shape == (2, 3, 8, 8)


# --- Graph and text ---------------------------------------------------------------------------------------


def test_graph_of_arrays(tmp_path):
    made_data.graph_arrays(tmp_path)
    graph = load_cora(tmp_path)
    assert graph.features.shape == (made_data.NODES, made_data.WORDS)
    sums = graph.features.sum(1)
    torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))
    assert [int(mask.sum()) for mask in graph[3:]] == [10, 10, 20]


def test_graph_of_planetoids_files(tmp_path):
    made_data.planetoid(tmp_path)
    graph = load_cora(tmp_path)
    assert graph.features.shape[1] == made_data.WORDS
    assert [int(mask.sum()) for mask in graph[3:]] == [20, 500, 1000]
    assert graph.edges.shape[0] == 2


def test_graph_that_is_missing(tmp_path, monkeypatch):
    import torch_geometric.datasets

    def offline(*args):
        raise OSError("no network")

    monkeypatch.setattr(torch_geometric.datasets, "Planetoid", offline)
    with pytest.raises(MissingDataError, match="Planetoid\\('DATA/planetoid', 'Cora'\\)"):
        load_cora(tmp_path)


def test_text_predicts_the_next_character(tmp_path):
    file = made_data.text(tmp_path)
    whole = file.read_text()
    found = load_text(tmp_path, 16)
    symbols = sorted(set(whole))
    assert found.symbols == len(symbols)
    inputs, targets = found.train[2]
    decoded = "".join(symbols[i] for i in inputs)
    assert decoded == whole[32:48]
    assert "".join(symbols[i] for i in targets) == whole[33:49]
    last, _ = found.test[0]
    cut = len(whole) - len(whole) // 10
    assert "".join(symbols[i] for i in last) == whole[cut : cut + 16]
    torch.testing.assert_close(found.train.__getitems__([2])[0][0], inputs)


def test_texts_that_do_not_serve(tmp_path):
    with pytest.raises(MissingDataError, match="--data-dir"):
        load_text(None, 16)
    with pytest.raises(MissingDataError, match="no text file"):
        load_text(tmp_path, 16)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(MissingDataError, match="too short"):
        load_text(tmp_path, 16)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MissingDataError, match="UTF-8"):
        load_text(tmp_path, 16)
