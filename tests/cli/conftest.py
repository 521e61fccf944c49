"""What the tests of the commands share."""

from __future__ import annotations

import pytest

from tfdp.cli import main


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command line with a cache of its own; gives exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call
