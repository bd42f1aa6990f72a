"""How much memory may be traded for time."""

from __future__ import annotations

from typing import Any, Optional

from opacus_ext.refused import Refused

CPU_CACHE = 2**22  # bytes worked on at a time by a CPU
_workspace = 64 * 2**20


class _Bound(int):
    """A bound that comes back into force where a ``with`` block ends."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        workspace(self)


def workspace(num_bytes: Optional[int] = None) -> int:
    """
    The one setting that trades memory for time: how many bytes the per-sample
    gradients may occupy for a while beside what training needs anyway.

    It bounds the blocks in which norms are computed, and in "ghost_bk" also the sum
    of all per-sample gradients that are cached from the norm to the clipped sum.
    Results do not depend on it.

    Args:
        num_bytes: new bound in bytes, for good or for a ``with`` block; None leaves it
            as it is

    Returns:
        The bound in force before the call, in bytes.

    Raises:
        Refused: if ``num_bytes`` is not positive

    Example:
        >>> import opacus_ext
        >>> before = opacus_ext.workspace(256 * 2**20)
        >>> opacus_ext.workspace(before) == 256 * 2**20
        True
        >>> with opacus_ext.workspace(2**20):
        ...     print(opacus_ext.workspace())
        1048576
        >>> opacus_ext.workspace() == before
        True
    """
    global _workspace
    if num_bytes is None:
        return _workspace
    if num_bytes <= 0:
        raise Refused(
            f"The workspace must be positive, got {num_bytes} bytes.",
            parameter="num_bytes",
            remedy="Results do not depend on it; the default is 64 MiB.",
        )
    before, _workspace = _workspace, int(num_bytes)
    return _Bound(before)


def bound_on(device_type: str) -> int:
    """Bytes to work on at a time: on a CPU what fits its cache, if that is less."""
    return min(_workspace, CPU_CACHE) if device_type == "cpu" else _workspace
