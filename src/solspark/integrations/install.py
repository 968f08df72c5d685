"""Put sparse attention into a loaded model, and take it out again.

`install` picks the integration for what it is given and returns the undo. `ProcessorSwap` is what
integrations share: it replaces attention processors of single modules, by path, and puts the very
same objects back.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol


class Plugin(Protocol):
    """What an integration's installer returns."""

    def apply(self) -> Plugin: ...

    def remove(self) -> None: ...

    def reset(self) -> None: ...

    def summary(self) -> dict[str, Any]: ...


class Installation:
    """Undo of one `install`: a context manager, a callable, and an object with `remove()`."""

    def __init__(self, plugin: Plugin):
        self.plugin = plugin

    def remove(self) -> None:
        """Put everything back; a second time does nothing."""
        self.plugin.remove()

    __call__ = remove

    def __enter__(self) -> Plugin:
        return self.plugin

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def install(target: Any, method: str = "spark", **options: Any) -> Installation:
    """Install sparse attention now and return its undo.

    Args:
        target: a MiniMax-H3 transformer, or a pipeline that holds exactly one of them under
            `transformer` or `transformer_ref`.
        method: "spark" or "sol".
        options: those of `install_h3_spark_attn` or `install_h3_sol_attn`.

    Returns:
        An `Installation`: call it, call its `remove()`, or use it in a `with` statement, which
        yields the plugin.

    Raises:
        MissingDependencyError: diffusers is missing.
        TypeError: the target is no model that solspark knows.
        ValueError, RuntimeError: as the installers.
    """
    from .minimax_h3 import install_h3_sol_attn, install_h3_spark_attn

    installers = {"spark": install_h3_spark_attn, "sol": install_h3_sol_attn}
    if method not in installers:
        raise ValueError(f"method: expected one of {', '.join(installers)}; got {method!r}")
    return Installation(installers[method](target, **options).apply())


class ProcessorSwap:
    """Attention processors of one model that are replaced until `restore`."""

    def __init__(self) -> None:
        self._saved: list[tuple[str, Any, Any, Any]] = []

    def swap(self, path: str, module: Any, replacement: Any) -> None:
        """Replace the processor of one attention module and remember the original object."""
        original = module.get_processor()
        self._saved.append((path, module, original, replacement))
        module.set_processor(replacement)

    def replaced(self) -> list[str]:
        """Return the paths whose processor is no longer the one that `swap` set."""
        return [path for path, module, _, ours in self._saved if module.get_processor() is not ours]

    def restore(self) -> list[str]:
        """Put the originals back, last first, and return the paths that were left alone.

        A module whose processor someone else has replaced keeps it. One failing module does not
        keep the others from being restored; its error is raised at the end.
        """
        kept: list[str] = []
        failure: BaseException | None = None
        while self._saved:
            path, module, original, ours = self._saved.pop()
            try:
                if module.get_processor() is ours:
                    module.set_processor(original)
                else:
                    kept.append(path)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return kept[::-1]
