"""What ingot's optimizers cost beside their peers: ``python -m benchmarks --help``."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler tells each time that it ran
