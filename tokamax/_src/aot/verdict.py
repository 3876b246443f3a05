"""What the compiler says of a config: a value, whether it takes it or not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokamax._src import errors
from tokamax._src.autotuning.outcome import Failure

KINDS = ("compiles", "resource exhausted", "refused", "not lowered", "timeout", "crashed")
_LASTING = KINDS[:3]
"""Kinds that another try would give again: the others depend on the machine, or cost nothing to find out."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a config.

    Attributes:
      kind: `compiles`; `resource exhausted`, it takes more memory than there is; `refused` by the compiler for another
        reason; `not lowered`, refused by JAX before that; `timeout`; `crashed`, the compiler ended its process.
      reason: one line that says why it does not compile.
      seconds: what compiling took.
      memory_bytes: the compiler's figures of main memory: arguments, output, temporary buffers, code.
      costs: the compiler's figures of the work; of a Pallas kernel it repeats what the kernel says of itself.
    """

    kind: str
    reason: str = ""
    seconds: float = 0.0
    memory_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise errors.ArgumentError(f"kind must be one of {KINDS}, got {self.kind!r}")

    @property
    def compiles(self) -> bool:
        """Whether the compiler takes the config."""
        return self.kind == "compiles"

    @property
    def is_lasting(self) -> bool:
        """Whether the same compiler would say it again, on any machine."""
        return self.kind in _LASTING

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> "Verdict":
        """Reads the answer of a worker process."""
        if "broken" in answer:
            return cls("crashed", _line(answer["broken"]))
        if "error" not in answer:
            return cls("compiles", "", answer["seconds"], answer["memory_bytes"], answer["costs"])
        kind = "resource exhausted" if "RESOURCE_EXHAUSTED" in answer["error"] else "refused"
        return cls(kind, _line(answer["error"]), answer["seconds"])

    @classmethod
    def not_lowered(cls, error: Exception) -> "Verdict":
        """Returns the verdict on what JAX itself refuses."""
        return cls("not lowered", _line(f"{type(error).__name__}: {error}"))

    def failure(self) -> Failure | None:
        """Returns it as an outcome of tuning; None if the config compiles."""
        if self.compiles:
            return None
        return Failure("timeout" if self.kind == "timeout" else "compile", f"{self.kind}: {self.reason}")

    @classmethod
    def from_json(cls, data: Any) -> "Verdict":
        """Reads what `dataclasses.asdict` gave.

        Raises:
          FormatError: if it is not that.
        """
        try:
            memory = {str(name): int(size) for name, size in data["memory_bytes"].items()}
            costs = {str(name): float(cost) for name, cost in data["costs"].items()}
            return cls(data["kind"], str(data["reason"]), float(data["seconds"]), memory, costs)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise errors.FormatError(f"a verdict must have {[f.name for f in dataclasses.fields(cls)]}") from error


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
