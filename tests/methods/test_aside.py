"""Work beside other work: right, alive as long as it is read, with and without a graph."""

from __future__ import annotations

import pytest
import torch

from solspark.methods import aside
from solspark.methods.aside import Aside


def test_without_a_gpu_it_simply_runs():
    x = torch.arange(6.0)
    order = []

    def run() -> torch.Tensor:
        order.append("run")
        return x * 2

    work = Aside(run, x.device)
    order.append("after")
    assert work.join().equal(x * 2) and order == ["run", "after"]
    assert work.join().equal(x * 2)


def test_what_fails_fails_at_once():
    with pytest.raises(ZeroDivisionError):
        Aside(lambda: 1 // 0, torch.device("cpu"))  # type: ignore[arg-type, return-value]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_results_are_right_and_memory_is_kept(overlap: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aside, "OVERLAP", overlap)
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.float64)
    expected = x @ x @ x
    for _ in range(20):
        own = x.clone()
        work = Aside(lambda y=own: y @ y @ y, x.device)
        # Churn that would overwrite what is still read, were it freed too early.
        for _ in range(4):
            torch.full_like(x, torch.nan)
        result = work.join()
        del own, work
        torch.full_like(x, torch.nan)
        assert result.equal(expected)


@pytest.mark.gpu
def test_it_can_be_captured():
    x = torch.randn(256, 256, device="cuda")
    (x @ x).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = Aside(lambda: x @ x, x.device)
        other = x + 1
        total = work.join() + other
    x.normal_()
    graph.replay()
    assert total.equal(x @ x + (x + 1))
