"""Import-compatible names of the landmark tree; it lives in solspark."""

from solspark.methods.reblock import (
    PreparedLandmarkTreeV2Permutation,
    recursive_landmark_tree_v2_blocks,
    recursive_landmark_tree_v2_reference,
)

__all__ = [
    "PreparedLandmarkTreeV2Permutation",
    "recursive_landmark_tree_v2_blocks",
    "recursive_landmark_tree_v2_reference",
]
