"""Small data sets in the formats of the real ones, made by the tests."""

import json
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np

CLASSES = 4


def pictures(count: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes ``[count, size, size, 3]`` whose brightness tells their labels."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    noise = generator.integers(0, 40, (count, size, size, 3))
    return (noise + 50 * labels[:, None, None, None]).astype(np.uint8), labels


def image_arrays(folder: Path, name: str, size: int = 32, count: int = 32) -> Path:
    (x, y), (x_test, y_test) = pictures(count, size), pictures(8, size, 1)
    file = folder / f"{name}.npz"
    np.savez(file, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return file


def image_folder(folder: Path, name: str, size: int = 32, count: int = 16, test: str = "test") -> Path:
    from PIL import Image

    for split, number in (("train", count), (test, 8)):
        for index, (pixels, label) in enumerate(zip(*pictures(number, size), strict=True)):
            place = folder / name / split / f"n0{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{index}.png")
    return folder / name


def parquet(folder: Path, name: str, image: str, label: str, size: int = 32, test: str = "test") -> Path:
    """As the hub has them: encoded images in columns of its own names, and what they mean in the schema."""
    import pyarrow as pa
    from PIL import Image
    from pyarrow.parquet import write_table

    place = folder / name / "data"
    place.mkdir(parents=True)
    names = {"names": [f"c{i}" for i in range(CLASSES)], "_type": "ClassLabel"}
    meaning = {"info": {"features": {image: {"_type": "Image"}, label: names}}}
    for split, number in (("train", 16), (test, 8)):
        encoded = []
        x, y = pictures(number, size)
        for pixels in x:
            with BytesIO() as file:
                Image.fromarray(pixels).save(file, "PNG")
                encoded.append({"bytes": file.getvalue(), "path": None})
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({image: pa.array(encoded, kind), label: pa.array(y.tolist(), pa.int64())})
        table = table.replace_schema_metadata({"huggingface": json.dumps(meaning)})
        write_table(table, place / f"{split}-00000-of-00001.parquet")
    return folder / name


NODES, WORDS = 40, 12


def graph_arrays(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    edges = generator.integers(0, NODES, (2, 80))
    masks = {name: np.zeros(NODES, bool) for name in ("train_mask", "val_mask", "test_mask")}
    for mask, part in zip(masks.values(), (slice(0, 10), slice(10, 20), slice(20, 40)), strict=True):
        mask[part] = True
    file = folder / "cora.npz"
    np.savez(
        file,
        features=generator.integers(0, 2, (NODES, WORDS)).astype(np.uint8),
        labels=np.arange(NODES) % 3,
        edge_index=np.concatenate((edges, edges[::-1]), axis=1),
        **masks,
    )
    return file


def planetoid(folder: Path, known: int = 20, tested: int = 1000) -> Path:
    """The raw files of Planetoid: pickled sparse matrices, a dictionary of neighbours, the test's nodes."""
    from scipy.sparse import csr_matrix

    generator = np.random.default_rng(0)
    everything = 520 + tested
    words = csr_matrix(generator.integers(0, 2, (everything, WORDS)).astype(np.float32))
    labels = np.eye(3, dtype=np.int32)[np.arange(everything) % 3]
    rest = everything - tested
    neighbours = {node: [(node + 1) % everything, (node + 7) % everything] for node in range(everything)}
    parts = {
        "x": words[:known],
        "y": labels[:known],
        "allx": words[:rest],
        "ally": labels[:rest],
        "tx": words[rest:],
        "ty": labels[rest:],
        "graph": neighbours,
    }
    raw = folder / "planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    for name, content in parts.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(content))
    order = generator.permutation(np.arange(rest, everything))
    (raw / "ind.cora.test.index").write_text("\n".join(map(str, order)) + "\n")
    return raw


def text(folder: Path) -> Path:
    file = folder / "tinyshakespeare.txt"
    file.write_text("To be, or not to be, that is the question.\n" * 60, encoding="utf-8")
    return file


def fashion(folder: Path, *, zipped: bool = True) -> Path:
    """The four files of Fashion-MNIST with a few pictures whose brightness tells their labels."""
    import gzip

    place = folder / "fashion-mnist"
    place.mkdir()
    for of, count in (("train", 130), ("t10k", 20)):
        pixels, labels = pictures(count, 28)
        for kind, array in (("images-idx3", pixels[..., 0]), ("labels-idx1", labels.astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            content = head + array.tobytes()
            name = f"{of}-{kind}-ubyte"
            if zipped:
                (place / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (place / name).write_bytes(content)
    return place


def diamonds(folder: Path, count: int = 200) -> Path:
    """A table of the columns that the real one has, with prices that depend on the weight."""
    generator = np.random.default_rng(0)
    lines = ['"carat","cut","color","clarity","depth","table","price","x","y","z"']
    for number in range(count):
        carat = 0.2 + generator.random()
        cut, color, clarity = (
            ("Ideal", "Good")[number % 2],
            "DEF"[number % 3],
            ("SI1", "VS2")[number // 2 % 2],
        )
        price = round(1000 * carat**2 + 100 * (number % 2))
        numbers = f"61.5,{55 + number % 5},{price},4.1,4.2,2.4{number % 9}"
        lines.append(f'{carat:.2f},"{cut}","{color}","{clarity}",{numbers}')
    file = folder / "diamonds.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
