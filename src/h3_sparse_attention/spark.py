"""Import-compatible names of the Spark primitives; they live in solspark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from solspark.methods.reblock import spark_block, spark_reblock
from solspark.methods.spark import spark_reweight

if TYPE_CHECKING:
    from solspark.integrations.minimax_h3 import install_h3_spark_attn

__all__ = ["install_h3_spark_attn", "spark_block", "spark_reblock", "spark_reweight"]


def __getattr__(name: str) -> Any:
    # The installer needs diffusers, the primitives do not.
    if name == "install_h3_spark_attn":
        from solspark.integrations.minimax_h3 import install_h3_spark_attn

        return install_h3_spark_attn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
