"""Sparse attention for video diffusion transformers: exact where it matters, summaries elsewhere.

Importing this package imports torch and nothing else that is heavy; each public name loads its
module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from solspark.errors import MissingDependencyError, SolsparkError, UnsupportedError
from solspark.types import (
    BLOCK,
    AttentionCall,
    BlockPlan,
    BlockSummaries,
    CallRecord,
    TokenGrid,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from solspark.diagnose import explain
    from solspark.methods.reblock import PreparedLandmarkTreeV2Permutation, spark_reblock
    from solspark.methods.sol import SolStats, get_sol_attn_backend, sol_attn
    from solspark.methods.spark import PackedConfig, packed_attention, spark_reweight
    from solspark.ops._dispatch import implementations, last_call, reasons
    from solspark.ops.block_sparse_attention import block_sparse_attention
    from solspark.ops.merge import merge
    from solspark.ops.select_blocks import mask_from_plan, plan_from_mask

_SOURCES = {
    "PackedConfig": "solspark.methods.spark",
    "PreparedLandmarkTreeV2Permutation": "solspark.methods.reblock",
    "SolStats": "solspark.methods.sol",
    "block_sparse_attention": "solspark.ops.block_sparse_attention",
    "explain": "solspark.diagnose",
    "get_sol_attn_backend": "solspark.methods.sol",
    "implementations": "solspark.ops._dispatch",
    "last_call": "solspark.ops._dispatch",
    "mask_from_plan": "solspark.ops.select_blocks",
    "merge": "solspark.ops.merge",
    "packed_attention": "solspark.methods.spark",
    "plan_from_mask": "solspark.ops.select_blocks",
    "reasons": "solspark.ops._dispatch",
    "sol_attn": "solspark.methods.sol",
    "spark_reblock": "solspark.methods.reblock",
    "spark_reweight": "solspark.methods.spark",
}

__all__ = [
    "BLOCK",
    "AttentionCall",
    "BlockPlan",
    "BlockSummaries",
    "CallRecord",
    "MissingDependencyError",
    "PackedConfig",
    "PreparedLandmarkTreeV2Permutation",
    "SolStats",
    "SolsparkError",
    "TokenGrid",
    "UnsupportedError",
    "block_sparse_attention",
    "explain",
    "get_sol_attn_backend",
    "implementations",
    "last_call",
    "mask_from_plan",
    "merge",
    "packed_attention",
    "plan_from_mask",
    "reasons",
    "sol_attn",
    "spark_reblock",
    "spark_reweight",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it, and keep it."""
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_SOURCES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
