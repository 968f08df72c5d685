"""Route every attention call of a program to the best declared backend, and send long
self-attention sparse.

router = Router(RouterConfig(backends=("Block-sparse attention",),
sparse=SparseConfig(enabled=True))) undo = router.install()
unfollow = follow(router, pipeline)
...
unfollow(), undo()
"""

from solspark.router.backend import (
    BLOCK_MASK,
    MASKED_BLOCK,
    TAIL,
    Backend,
    Constraints,
    Platform,
    Registry,
    RouteCall,
    detect_platform,
)
from solspark.router.backends import builtin_registry
from solspark.router.chain import Entry, RoutePlan, build_plan
from solspark.router.config import RouterConfig, SparseConfig, default_labels
from solspark.router.context import RouteContext
from solspark.router.explain import RouteRecord
from solspark.router.hooks import follow
from solspark.router.install import Router
from solspark.router.layout import TokenLayout, layout_from_segments, live_segments
from solspark.router.selector import Selection, SelectorSpec, select_adaptive, select_radial
from solspark.router.stage import SparseStage

__all__ = [
    "BLOCK_MASK",
    "MASKED_BLOCK",
    "TAIL",
    "Backend",
    "Constraints",
    "Entry",
    "Platform",
    "Registry",
    "RouteCall",
    "RouteContext",
    "RoutePlan",
    "RouteRecord",
    "Router",
    "RouterConfig",
    "Selection",
    "SelectorSpec",
    "SparseConfig",
    "SparseStage",
    "TokenLayout",
    "build_plan",
    "builtin_registry",
    "default_labels",
    "detect_platform",
    "follow",
    "layout_from_segments",
    "live_segments",
    "select_adaptive",
    "select_radial",
]
