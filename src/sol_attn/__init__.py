"""The import names of the original Sol-Attn package; solspark defines what stands behind them."""

from solspark.methods.sol import get_sol_attn_backend, sol_attn

__all__ = ["get_sol_attn_backend", "sol_attn"]
