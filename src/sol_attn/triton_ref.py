"""The original package's name of its portable entry; here one function serves every device."""

from solspark.methods.sol import sol_attn

__all__ = ["sol_attn"]
