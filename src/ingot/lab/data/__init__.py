"""Data sets: where they are found, and how they become tensors."""
