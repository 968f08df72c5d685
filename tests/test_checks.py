"""Boundary checks: a wrong type is a TypeError, a wrong value a ValueError, both named."""

from __future__ import annotations

import math

import pytest
import torch

from solspark import _checks


def test_ints() -> None:
    assert _checks.check_int("n", 3, 0, 3) == 3
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=r"n: expected an int, got"):
            _checks.check_int("n", wrong, 0)
    with pytest.raises(ValueError, match=r"n: expected an int in \[0, 3\], got 4"):
        _checks.check_int("n", 4, 0, 3)


def test_floats() -> None:
    assert _checks.check_float("x", 3) == 3.0
    assert _checks.check_float("x", math.inf, finite=False) == math.inf
    for wrong in (True, "1", None, torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"x: expected a number, got"):
            _checks.check_float("x", wrong)
    with pytest.raises(ValueError, match=r"x: expected a finite number, got inf"):
        _checks.check_float("x", math.inf)
    with pytest.raises(ValueError, match=r"x: expected a number, got nan"):
        _checks.check_float("x", math.nan, finite=False)


def test_devices() -> None:
    assert _checks.as_device("d", "cpu") == _checks.as_device("d", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"d: expected what torch.device takes, got 'gpu'"):
        _checks.as_device("d", "gpu")
    for wrong in (torch.zeros(1), None, 1.5):
        with pytest.raises(TypeError, match=r"d: expected what torch.device takes, got [A-Z]?\w+"):
            _checks.as_device("d", wrong)


def test_scale() -> None:
    assert _checks.resolve_scale(None, 64) == 0.125
    assert _checks.resolve_scale(2, 64) == 2.0


def test_ranges() -> None:
    assert _checks.check_ranges("r", [(0, 3), [2, 2], (4, 5)], 5) == ((0, 3), (4, 5))
    assert _checks.check_ranges("r", (), 5) == ()
    for wrong in (None, 3, "ab"):
        with pytest.raises(TypeError, match=r"r: expected a sequence"):
            _checks.check_ranges("r", wrong, 5)
    with pytest.raises(TypeError, match=r"r\[1\]: expected a pair"):
        _checks.check_ranges("r", [(0, 1), 2], 5)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulation(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert _checks.accumulation_dtype(dtype) == expected


def test_key_bias_is_brought_to_one_form() -> None:
    like = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)
    keep = torch.tensor([True, False, True, True, False])
    bias = _checks.normalise_key_bias(keep, 2, 3, 5, like)
    assert bias is not None and bias.shape == (2, 1, 5) and bias.dtype == torch.float32
    assert bias[1, 0].tolist() == [0.0, -math.inf, 0.0, 0.0, -math.inf]
    bias = _checks.normalise_key_bias(torch.ones(2, 3, 1, 5, dtype=torch.float16), 2, 3, 5, like)
    assert bias is not None and bias.shape == (2, 3, 5)
    bias = _checks.normalise_key_bias(torch.ones(5), 2, 3, 5, like.double())
    assert bias is not None and bias.dtype == torch.float64
    assert _checks.normalise_key_bias(None, 2, 3, 5, like) is None
    with pytest.raises(ValueError, match=r"key_bias: expected the device cpu, got meta"):
        _checks.normalise_key_bias(torch.ones(5, device="meta"), 2, 3, 5, like)


def test_a_copy_only_where_the_last_stride_is_not_one() -> None:
    tensor = torch.zeros(2, 3, 4, 8)
    view = tensor.transpose(1, 2)
    assert _checks.last_dim_contiguous(view) is view
    odd = tensor[..., ::2]
    assert _checks.last_dim_contiguous(odd).stride(-1) == 1
