"""An example of a framework in one of several processes, where torchvision may lack its operators.

``torchrun --nproc-per-node 2 -m tests.distributed.example NAME FOLDER [KEYWORD=VALUE...]``
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import distributed as dist

import ingot
from ingot.lab.torchvision_ops import make_torchvision_importable
from tests.distributed.training import leave

EXAMPLES = Path(__file__).parents[2] / "examples"


def main():
    make_torchvision_importable()
    torch.set_num_threads(1)
    name, folder, *options = sys.argv[1:]
    os.chdir(folder)
    made, singd, leave = [], ingot.SINGD, dist.destroy_process_group

    def observed(*args, **settings):
        made.append(singd(*args, **settings))
        return made[-1]

    def leaves(group=None):
        # The last moment at which processes can tell each other what they have.
        if group is None:
            (optimizer,) = made
            _compare(optimizer)
            Path(f"equal{dist.get_rank()}").touch()
        leave(group)

    ingot.SINGD, dist.destroy_process_group = observed, leaves
    if options:
        keywords = {key: int(value) if value.isdigit() else value for key, value in _pairs(options)}
        print(f"accuracy: {runpy.run_path(str(EXAMPLES / f'{name}.py'))['main'](**keywords):.3f}")
    else:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    if dist.is_initialized():  # as Lightning leaves it, unless it is on graphics cards
        leaves()


def _pairs(options):
    return (option.split("=") for option in options)


def _compare(optimizer):
    """Both processes trained, together: their weights and factors are the same."""
    assert dist.get_world_size() == 2
    tensors = [p.detach() for p in optimizer._watch.model.parameters()]
    tensors += [state["K"] for state in optimizer.state.values() if "K" in state]
    assert len(tensors) > len(list(optimizer._watch.model.parameters()))
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(*both)
    assert optimizer._now.replicas is not None


if __name__ == "__main__":
    main()
    leave()
