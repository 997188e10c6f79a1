"""What every test starts from."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Let a fit within this process not change how later tests round."""
    yield
    torch.set_flush_denormal(False)
