"""Files that are no checkpoints any more, or never were: nothing is loaded by half, and no code is run."""

import io
import os
import pickle
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoints.victim import Victim


@pytest.fixture(scope="module")
def good() -> dict:
    return Victim().good


def _file(contents: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(contents, file, **options)
    return file.getvalue()


def _formats(good: dict) -> dict[str, bytes]:
    return {"zip": _file(good), "legacy": _file(good, _use_new_zipfile_serialization=False)}


def _load(contents: bytes, path: Path) -> str:
    """Load a file as users do: torch cannot read it, or the optimizer refuses it, or all of it is loaded."""
    path.write_bytes(contents)
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception:
        return "unreadable"
    return "loaded" if Victim().loads(loaded) else "refused"


@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_truncated_files(good, layout, tmp_path):
    whole = _formats(good)[layout]
    assert _load(whole, tmp_path / "whole.pt") == "loaded"
    starts, ends = (0, 1, 2, 3, 10), range(len(whole) - 30, len(whole), 5)
    for end in (*starts, *range(50, len(whole) - 50, len(whole) // 30), *ends):
        assert _load(whole[:end], tmp_path / "truncated.pt") == "unreadable", end


@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_flipped_bits(good, layout, tmp_path):
    whole, chance = _formats(good)[layout], random.Random(layout)
    outcomes = []
    for _ in range(80):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        outcomes.append(_load(bytes(damaged), tmp_path / "flipped.pt"))
    assert {"unreadable", "loaded"} <= set(outcomes)


def _entries(whole: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, contents in entries.items():
            archive.writestr(name, contents)
    return file.getvalue()


def test_damaged_archives(good, tmp_path):
    entries = _entries(_file(good))
    assert _load(_zipped(entries), tmp_path / "whole.pt") == "loaded"
    for name in entries:
        missing = {key: value for key, value in entries.items() if key != name}
        outcome = _load(_zipped(missing), tmp_path / "missing.pt")
        assert outcome == "unreadable" or ("/data/" not in name and "pkl" not in name), name
        if "/data/" in name:
            assert _load(_zipped(entries | {name: b""}), tmp_path / "empty.pt") == "unreadable"
            assert _load(_zipped(entries | {name: entries[name][:-1]}), tmp_path / "short.pt") == "unreadable"


OTHERS = {
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"lr: 0.001\nstate: none\n",
    "json": b'{"state": {}, "param_groups": []}',
    "an archive": _zipped({"readme.txt": b"hello"}),
    "an empty archive": _zipped({}),
    "a pickled dict": pickle.dumps({"state": {}, "param_groups": []}),
    "a pickled array": pickle.dumps(np.ones(3)),
    "a pickled class": pickle.dumps(Path),
    "a pickled object": pickle.dumps(Path("/")),
    "a tensor": _file(torch.ones(3)),
    "a list": _file([1, 2, 3]),
    "an empty dict": _file({}),
    "a dict without anything": _file({"state": {}, "param_groups": []}),
    "a state_dict of a model": _file(nn.Linear(2, 2).state_dict()),
    "a whole model": _file(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_files(other, tmp_path):
    assert _load(OTHERS[other], tmp_path / "other.pt") in ("unreadable", "refused")


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


def _attacks(marker: Path) -> dict[str, Attack]:
    touch = f"open({str(marker)!r}, 'w').close()"
    return {
        "system": Attack(os.system, f"touch {marker}"),
        "popen": Attack(subprocess.call, ["touch", str(marker)]),
        "exec": Attack(exec, touch),
        "eval": Attack(eval, touch),
        "mkdir": Attack(os.mkdir, str(marker)),
    }


TARGETS = {
    "whole": lambda good, attack: attack,
    "state": lambda good, attack: good | {"state": attack},
    "tensor": lambda good, attack: good | {"state": good["state"] | {0: {"K": attack}}},
    "setting": lambda good, attack: good | {"param_groups": [good["param_groups"][0] | {"lr": attack}]},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", _attacks(Path()))
def test_code_in_a_file_is_never_run(good, name, target, tmp_path):
    marker = tmp_path / "marker"
    contents = TARGETS[target](good, _attacks(marker)[name])
    files = [*_formats(contents).values(), pickle.dumps(_plain(contents))]
    for file in files:
        assert _load(file, tmp_path / "attack.pt") == "unreadable"
        assert not marker.exists()
    torch.load(io.BytesIO(files[0]), weights_only=False)
    assert marker.exists()  # the attack is one


def _plain(contents: Any) -> Any:
    return contents if isinstance(contents, Attack) else contents | {"param_groups": []}
