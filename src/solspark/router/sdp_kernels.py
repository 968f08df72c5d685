"""torch's own attention kernels: switch them as configured, and back to what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


class SdpKernels:
    """Remember torch's kernel flags while a router has its own."""

    def __init__(self) -> None:
        self._flags: dict[str, bool] = {}

    def apply(self, kernels: Collection[str] | None) -> None:
        """Leave only the named kernels on; None leaves torch's flags alone."""
        if kernels is None:
            return
        for name, (read, write) in _switches().items():
            self._flags[name] = read()
            write(name in kernels)

    def restore(self) -> None:
        """Put the flags back as they were before `apply`."""
        for name, value in self._flags.items():
            _switches()[name][1](value)
        self._flags = {}


def _switches() -> dict[str, tuple[Callable[[], bool], Callable[[bool], None]]]:
    """Return how to read and set each of torch's kernel flags."""
    cuda = torch.backends.cuda
    return {
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    }
