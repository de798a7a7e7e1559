"""``ingot``, or ``python -m ingot.lab``."""

import gc
import sys


def main(name: str = "ingot") -> None:
    """Run a command of the laboratory."""
    try:
        from ingot.lab.commands import app
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: run `pip install 'ingot[lab]'` first") from error
    try:
        app(prog_name=name)
    finally:
        _leave_processes()


def _leave_processes() -> None:
    """End what connects this process with others, if anything does: torch may abort if nobody does."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()  # models, which would keep up what is ended here
        distributed.destroy_process_group()


if __name__ == "__main__":
    main("python -m ingot.lab")
