"""Tests that ask for `place` run on the CPU, and on a GPU once for each implementation it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from solspark.ops import _dispatch, sol_int8  # noqa: F401  (registers its implementations)


@pytest.fixture(
    params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "hopper"))]
)
def place(request: pytest.FixtureRequest, monkeypatch) -> Iterator[str]:
    """Make new tensors on the device, and let one implementation serve before all others."""
    name = request.param
    if name == "cpu":
        yield name
        return
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a device of compute capability 9.0")
    others = tuple(item for item in _dispatch.PREFERENCE if item != name)
    monkeypatch.setattr(_dispatch, "PREFERENCE", (name, *others))
    served = _dispatch._registry["sol_int8"]
    monkeypatch.setitem(served, name, replace(served[name], on_request=""))
    with torch.device("cuda"):
        yield name
