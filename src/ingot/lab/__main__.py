"""``python -m ingot.lab``."""

try:
    from ingot.lab.cli import app
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: run `pip install 'ingot[lab]'` first") from error

app(prog_name="python -m ingot.lab")
