"""``ingot``, or ``python -m ingot.lab``."""


def main(name: str = "ingot") -> None:
    """Run a command of the laboratory."""
    try:
        from ingot.lab.commands import app
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: run `pip install 'ingot[lab]'` first") from error
    app(prog_name=name)


if __name__ == "__main__":
    main("python -m ingot.lab")
