"""Import-compatible names of the H3 sparse attention package; all of them live in solspark.

Everything but the config is looked up when it is first used, so that importing this package needs
torch alone and a Sol-only user never imports Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from solspark.integrations.h3_config import H3SparseAttentionConfig

if TYPE_CHECKING:
    from h3_sparse_attention.spark import spark_block, spark_reblock, spark_reweight
    from solspark.integrations.minimax_h3 import (
        H3SparseAttentionPlugin,
        install_h3_sol_attn,
        install_h3_spark_attn,
        install_h3_sparse_attention,
    )

_HOMES = {
    "H3SparseAttentionPlugin": "solspark.integrations.minimax_h3",
    "install_h3_sol_attn": "solspark.integrations.minimax_h3",
    "install_h3_spark_attn": "solspark.integrations.minimax_h3",
    "install_h3_sparse_attention": "solspark.integrations.minimax_h3",
    "spark_block": "h3_sparse_attention.spark",
    "spark_reblock": "h3_sparse_attention.spark",
    "spark_reweight": "h3_sparse_attention.spark",
}

__all__ = [
    "H3SparseAttentionConfig",
    "H3SparseAttentionPlugin",
    "install_h3_sol_attn",
    "install_h3_spark_attn",
    "install_h3_sparse_attention",
    "spark_block",
    "spark_reblock",
    "spark_reweight",
]


def __getattr__(name: str) -> Any:
    if name in ("landmark_tree_v2", "spark"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
