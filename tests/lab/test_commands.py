"""What all commands of the laboratory share: options, and what is wrong with some."""

import pytest

from tests.lab.command import invoke, plain

COMMANDS = ("demo", "precision")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--steps", "0", "1 or more"),
        ("--seeds", "-1", "1 or more"),
        ("--threads", "0", "1 or more"),
        ("--threads", "100000", "or fewer"),
    ],
)
def test_bad_values_name_the_remedy(tmp_path, command, option, value, remedy):
    result = invoke(command, "--out", str(tmp_path / "new"), option, value)
    assert result.exit_code != 0
    assert f"Invalid value for '{option}': {value} is" in plain(result.stderr)
    assert remedy in plain(result.stderr)
    assert not (tmp_path / "new").exists()


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = invoke("demo", "--steps", "1", "--out", str(tmp_path / "file"))
    assert result.exit_code != 0
    assert "name another one" in plain(result.stderr)


def test_help_names_the_commands():
    shown = plain(invoke("--help").stdout)
    assert all(command in shown for command in COMMANDS)
