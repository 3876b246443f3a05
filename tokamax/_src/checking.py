"""Whether the configs that would run here and now compile."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from tokamax._src import devices, errors
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.autotuning.result import describe_config
from tokamax._src.bound_arguments import BoundArguments, ConfigChoice
from tokamax._src.tables import Report


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """What `check` found: per op call, the config it runs with and whether that compiles.

    Attributes:
      rows: bound arguments, the choice (None if dispatch raised), and what is wrong (None if nothing is).
      device_kind: the device.
    """

    rows: tuple[tuple[BoundArguments, ConfigChoice | None, str | None], ...]
    device_kind: str

    @property
    def ok(self) -> bool:
        """Whether every chosen config compiles."""
        return all(reason is None for _, _, reason in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, one item per op call."""
        items = []
        for ba, choice, reason in self.rows:
            item = {"op": ba.op.registered_name(), "arguments": repr(ba), "error": reason}
            if choice is not None:
                item |= {"config": describe_config(choice.config), "source": choice.source}
            items.append(item)
        return {"device_kind": self.device_kind, "ok": self.ok, "ops": items}

    def table(self) -> list[tuple[str, ...]]:
        """See `Report`."""
        rows = [("op", "arguments", "config", "source", "compiles")]
        for ba, choice, reason in self.rows:
            config, source = ("-", "error") if choice is None else (describe_config(choice.config), choice.source)
            rows.append((ba.op.registered_name(), ba.shown_arguments, config, source, reason or "yes"))
        return rows

    def total(self) -> str:
        """See `Report`."""
        failed = sum(reason is not None for _, _, reason in self.rows)
        return f"{len(self.rows) - failed} of {len(self.rows)} compile on {self.device_kind}"


def compiled(choices: Iterable[tuple[BoundArguments, ConfigChoice | errors.TokamaxError]]) -> CheckReport:
    """Compiles each op call with the config chosen for it, and says what came of it; runs nothing."""
    rows: list[tuple[BoundArguments, ConfigChoice | None, str | None]] = []
    for ba, choice in choices:
        if not isinstance(choice, ConfigChoice):
            rows.append((ba, None, str(choice)))
            continue
        function, arrays = ba.as_function(choice.config)
        specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        try:
            jax.jit(function).lower(specs).compile()
        except Exception as error:
            rows.append((ba, choice, Failure.of("compile", error).reason))
        else:
            rows.append((ba, choice, None))
    return CheckReport(tuple(rows), devices.device_kind())
