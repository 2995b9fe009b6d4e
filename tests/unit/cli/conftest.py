"""What the tests of commands share."""

from pathlib import Path

import pytest

from tests.kit.converting import model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "source")
