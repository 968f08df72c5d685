"""The backends that solspark declares. Importing this imports none of them."""

from __future__ import annotations

import torch

from solspark.router.backend import BLOCK_MASK, TAIL, Backend, Constraints, Registry
from solspark.router.backends.dynamic import prepare_dynamic
from solspark.router.backends.flex import prepare_flex
from solspark.router.backends.own import (
    OWN_CAPS,
    prepare_block_sparse,
    prepare_quantized,
    prepare_triton,
    triton_obstacles,
)
from solspark.router.backends.packages import (
    flash4_obstacles,
    flash_obstacles,
    prepare_flash,
    prepare_flash4,
    prepare_sage,
    sage_obstacles,
)

_HALF = frozenset({torch.float16, torch.bfloat16})
_FLOAT = frozenset({torch.float16, torch.bfloat16, torch.float32})

PARITY_GATES: dict[str, Constraints] = {
    # A terminal serves whatever is left: its gate is never asked.
    "dynamic": Constraints(allow_cpu=True),
    "flex": Constraints(min_ndim=4, same_device=True),
    "triton": Constraints(max_head_dim=128, allow_mask=False, same_device=True),
    "flash": Constraints(max_head_dim=128, allow_mask=False, allow_float32=False, same_device=True),
    "sage": Constraints(head_dims=frozenset({64, 96, 128}), allow_mask=False, same_device=True),
    "quantized": Constraints(min_tokens=32, min_long_side=512, min_heads=2),
}
"""The gates as the public router had them: some let calls through that nobody can serve."""

CLOSED_GATES: dict[str, Constraints] = {
    "dynamic": Constraints(allow_cpu=True),
    "flex": Constraints(
        min_ndim=4, same_device=True, allow_dropout=False, whole_groups=True, allow_extra=False
    ),
    "triton": Constraints(
        min_ndim=4,
        max_head_dim=128,
        head_dim_multiple=8,
        allow_mask=False,
        same_device=True,
        dtypes=_FLOAT,
        allow_dropout=False,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
    "flash": Constraints(
        max_head_dim=128,
        allow_mask=False,
        same_device=True,
        dtypes=_HALF,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
    "flash4": Constraints(
        min_ndim=4,
        max_head_dim=128,
        allow_mask=False,
        same_device=True,
        dtypes=_HALF,
        allow_dropout=False,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
    "sage": Constraints(
        min_ndim=4,
        head_dims=frozenset({64, 96, 128}),
        allow_mask=False,
        same_device=True,
        dtypes=_HALF,
        allow_dropout=False,
        allow_grad=False,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
    "quantized": Constraints(
        min_ndim=4,
        min_tokens=32,
        min_long_side=512,
        min_heads=2,
        max_head_dim=128,
        head_dim_multiple=8,
        same_device=True,
        dtypes=_FLOAT,
        allow_dropout=False,
        allow_mask_grad=False,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
    "block_sparse": Constraints(
        allow_cpu=True,
        min_ndim=4,
        head_dims=frozenset({64, 128}),
        same_device=True,
        key_mask_only=True,
        allow_causal=False,
        allow_dropout=False,
        allow_grad=False,
        whole_groups=True,
        same_value_dim=True,
        allow_extra=False,
    ),
}
"""The gates with every hole closed: rather declined with the reason than served wrongly."""


def builtin_registry(*, parity: bool = False) -> Registry:
    """Return a registry of the built-in backends.

    Args:
        parity: declare the six historic backends with their historic gates, holes included, to
            compare with the public router. The default closes the holes and adds flash-attn 4 and
            the BF16 block-sparse attention.

    Source: spec/router.md 1.3 and 1.9.
    """
    gates = PARITY_GATES if parity else CLOSED_GATES
    quantized_options = (
        "quantized_granularity",
        "quantized_hadamard",
        "quantized_matmul",
        "quantized_pv",
        "quantized_smooth_k",
    )
    backends = [
        Backend(
            "dynamic",
            "Dynamic attention",
            10,
            prepare_dynamic,
            gates["dynamic"],
            terminal=True,
            options=("dynamic_slice_gib", "dynamic_trigger_gib"),
        ),
        Backend(
            "flex", "Flex attention", 20, prepare_flex, gates["flex"], caps=frozenset({BLOCK_MASK})
        ),
        Backend(
            "triton",
            "Triton Flash attention",
            30,
            prepare_triton,
            gates["triton"],
            platforms=frozenset({"rocm", "zluda"}),
            obstacles=triton_obstacles,
        ),
        Backend(
            "flash", "Flash attention", 40, prepare_flash, gates["flash"], obstacles=flash_obstacles
        ),
        Backend(
            "sage", "Sage attention", 50, prepare_sage, gates["sage"], obstacles=sage_obstacles
        ),
        Backend(
            "quantized",
            "Quantized attention",
            60,
            prepare_quantized,
            gates["quantized"],
            options=quantized_options,
            caps=OWN_CAPS,
            obstacles=triton_obstacles,
        ),
    ]
    if not parity:
        backends += [
            Backend(
                "flash4",
                "Flash attention 4",
                45,
                prepare_flash4,
                gates["flash4"],
                obstacles=flash4_obstacles,
            ),
            Backend(
                "block_sparse",
                "Block-sparse attention",
                55,
                prepare_block_sparse,
                gates["block_sparse"],
                caps=OWN_CAPS | {TAIL},
                selection_only=True,
            ),
        ]
    return Registry(tuple(backends))
