"""Configs that a calculation favours on a device where nothing was measured: what a file of them holds.

They are kept apart from measured winners, in `<op>.estimated.json` beside `<op>.best.json`: below every measurement at
dispatch, and never training data.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tokamax._src import environment, errors, serialization
from tokamax._src.autotuning import keyed


@dataclasses.dataclass(frozen=True)
class Estimated:
    """The best config by estimate, as dispatch sees it.

    Attributes:
      config: the config, as JSON data of its fields.
      ms: its estimated time.
      environment: versions of library and compiler, and the time.
    """

    config: Mapping[str, Any]
    ms: float
    environment: Mapping[str, Any]

    @classmethod
    def of(cls, entry: Any) -> "Estimated | None":
        """Returns the best config of an `Entry` that is estimated; None for one that is measured, or has none."""
        if entry.best is None or (ms := entry.estimated_ms.get(entry.best)) is None:
            return None
        names = (*environment.STRICT, "compiler", "time")
        kept = {name: entry.environment[name] for name in names if name in entry.environment}
        return cls(serialization.encode_fields(entry.best), ms, kept)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {"config": dict(self.config), "estimated_ms": self.ms, "environment": dict(self.environment)}

    @classmethod
    def from_json(cls, data: Any) -> "Estimated":
        """Reads what `to_json` wrote.

        Raises:
          FormatError: if it is not that.
        """
        try:
            config, env, ms = data["config"], data["environment"], data["estimated_ms"]
        except (TypeError, KeyError) as error:
            raise errors.FormatError("an estimated config must have config, estimated_ms and environment") from error
        if not (isinstance(config, dict) and isinstance(env, dict)):
            raise errors.FormatError("config and environment must be objects")
        return cls(config, checked_ms(ms), env)


def checked_ms(value: Any) -> float:
    """Returns an estimated time.

    Raises:
      FormatError: if it is no positive, finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise errors.FormatError(f"an estimated time must be a positive number of ms, got {str(value)[:40]}")
    return float(value)


def of_entries(entries: Iterable[Any]) -> dict[str, Estimated]:
    """Returns key -> estimated config, for entries of one op and device; later entries of a key win."""
    return {entry.key: found for entry in entries if (found := Estimated.of(entry)) is not None}


FILES = keyed.Form("tokamax-estimated", 1, "estimated for", Estimated.to_json, Estimated.from_json)
"""How they are kept."""
