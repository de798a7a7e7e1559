"""What ingot's optimizers cost beside their peers: ``python -m benchmarks --help``."""
