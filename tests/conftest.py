"""What every test shares: one thread a process, and no GPU test without a GPU."""

from __future__ import annotations

import pytest
import torch

# Two workers with two threads each fight over two cores; small kernels then run far slower.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Draw the same numbers in a test whether it runs alone or after others."""
    torch.manual_seed(0)
