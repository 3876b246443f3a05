"""The reference of ops whose default config is the plain form."""

from typing import Any


def reference(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what an op computes with a config of which every field has its default; made for `Op._reference`."""
    return op._fwd(*args, **kwargs, return_residuals=False, config=op.config_cls())[0]
