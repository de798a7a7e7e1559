"""What tests need to run training frameworks."""

import pytest

from ingot.lab.torchvision_ops import make_torchvision_importable

IGNORED_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        # The Trainer of transformers pins memory unless it is told not to.
        "'pin_memory' argument is set as true but no accelerator is found:UserWarning",
        # Lightning's advice on the data, the machine and the folder, and a torch that is newer than it.
        r"The number of training batches \(\d+\) is smaller than the logging interval",
        "The '.*_dataloader' does not have many workers",
        "The dirpath has changed from .*version_0.* to .*version_1",
        "Precision bf16-mixed is not supported by the model summary",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    )
]


def start_afresh() -> None:
    """As in a new process, on any machine.

    accelerate keeps its state in classes, and transformers uses accelerate. lightning and transformers
    import torchvision.
    """
    make_torchvision_importable()
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
