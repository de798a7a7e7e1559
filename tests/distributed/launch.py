"""Start the worker in several processes, and read what it found."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command, timeout=600, environment=None):
    """Run a command whose processes have one thread each."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()} | (environment or {})
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def _path():
    """Where modules are found: the tests beside what this process finds."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def torchrun(processes, *arguments, timeout=600, options=(), environment=None):
    """Run a module or script in so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *options, *arguments]
    return run(command, timeout, environment)


def found_by(processes, folder, *scenarios):
    """What scenarios of the worker came to in so many processes."""
    results = Path(folder) / "results.json"
    results.unlink(missing_ok=True)
    ended = torchrun(processes, "-m", "tests.distributed.worker", str(results), *scenarios)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return json.loads(results.read_text())


def once(folder, find):
    """What a function found, called by the first of pytest's workers that asks; the others wait for it."""
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + 600
        while not (folder / "done").exists() and time.monotonic() < until:
            time.sleep(0.2)
    else:
        try:
            (folder / "found.json").write_text(json.dumps(find()))
        finally:
            (folder / "done").touch()
    return json.loads((folder / "found.json").read_text())  # which is not there if the first one failed
