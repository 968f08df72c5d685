"""INT8 Sol-Attn under the call order of its public API.

`sol_attn` takes Q, K and V; `sol_attn_chunked` takes the fused QKV projection chunk by chunk and
never holds them; `sol_attn_is_available` says whether GPU kernels serve a device.
"""

from solspark.methods.sol_int8 import sol_attn, sol_attn_chunked, sol_attn_is_available

__all__ = ["sol_attn", "sol_attn_chunked", "sol_attn_is_available"]
