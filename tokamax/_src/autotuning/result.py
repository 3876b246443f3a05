"""Tuning results: entries, their JSON, merging, and the overlay that makes a result active.

An `Entry` is one tuning session of one bound op, losers and failures included, or what was estimated of it. An
`AutotuningResult` holds entries, at most one per key and device, and cost models fitted on them. Reading judges each
entry alone: one that this process cannot understand (an op that is not imported, another schema) is kept as it is, and
written back.
"""

import base64
import collections
import dataclasses
import functools
import io
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import IO, Any

from tokamax._src import devices, environment, errors, options, serialization
from tokamax._src.autotuning import outcome as outcome_lib
from tokamax._src.autotuning.estimated import Estimated, checked_ms
from tokamax._src.autotuning.summary import Row, Summary
from tokamax._src.bound_arguments import BoundArguments, get_runtime
from tokamax._src.costmodel import dataset
from tokamax._src.costmodel import model as model_lib
from tokamax._src.files import write_atomically

SCHEMA = "tokamax-autotuning-result"
VERSION = 1

_ENTRY_FIELDS = ("bound_args", "device_kind", "outcomes", "default", "best", "environment", "error", "estimated_ms")


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One tuning session of one bound op; or, if `is_estimated`, what was estimated without measuring.

    Attributes:
      bound_args: the op and its arguments.
      device_kind: where it was measured, or what it was estimated for.
      outcomes: config -> measurement or failure, for every config that was tried. No measurement if it is estimated.
      default: the op's default config.
      best: the config to use; None if nothing ran.
      environment: versions, device properties, timing method and time.
      error: why the op could not be tuned at all, else None.
      estimated_ms: config -> estimated time, for configs that the compiler takes; empty where configs were measured.
      extra: fields that this version does not know; written back as they are.
    """

    bound_args: BoundArguments
    device_kind: str
    outcomes: Mapping[Any, outcome_lib.Outcome]
    default: Any
    best: Any
    environment: Mapping[str, Any]
    error: str | None = None
    estimated_ms: Mapping[Any, float] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.estimated_ms and not all(isinstance(o, outcome_lib.Failure) for o in self.outcomes.values()):
            raise errors.ArgumentError(
                f"an entry must hold measured or estimated times, got both for {self.bound_args!r}; make two entries"
            )

    @property
    def is_estimated(self) -> bool:
        """Whether its times are estimated: below every measurement at dispatch, and no training data."""
        return bool(self.estimated_ms)

    @property
    def key(self) -> str:
        """The key of the bound arguments."""
        return self.bound_args.key

    def median_ms(self, config: Any) -> float | None:
        """Returns the median time of a config in ms, or None if it was not measured or failed."""
        found = self.outcomes.get(config)
        return None if found is None or isinstance(found, outcome_lib.Failure) else found.median_ms

    @property
    def speedup(self) -> float | None:
        """Default time over best time; None unless both were measured."""
        best, default = self.median_ms(self.best), self.median_ms(self.default)
        return None if best is None or default is None else default / best

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as plain JSON data.

        Raises:
          SerializationError: if an argument has no name that a file could carry, for example a lambda.
        """
        return {
            **self.extra,
            "bound_args": self.bound_args.to_json(),
            "device_kind": self.device_kind,
            "default": _config_to_json(self.default),
            "best": _config_to_json(self.best),
            "outcomes": [[_config_to_json(c), outcome_lib.to_json(o)] for c, o in self.outcomes.items()],
            "environment": dict(self.environment),
            "error": self.error,
            **self._estimated_json(),
        }

    def _estimated_json(self) -> dict[str, Any]:
        if not self.estimated_ms:
            return {}
        return {"estimated_ms": [[_config_to_json(config), ms] for config, ms in self.estimated_ms.items()]}

    @classmethod
    def from_json(cls, data: Any) -> "Entry":
        """Reads what `to_json` wrote.

        Raises:
          FormatError: if it is not that, or names an op that this process does not know.
        """
        if not isinstance(data, dict) or any(name not in data for name in _ENTRY_FIELDS[:3]):
            raise errors.FormatError(f"an entry must be an object with {_ENTRY_FIELDS[:3]}")
        ba = BoundArguments.from_json(data["bound_args"])
        outcomes = {_config_from_json(ba, c): outcome_lib.from_json(o) for c, o in _pairs(data, "outcomes")}
        estimated = {_config_from_json(ba, c): checked_ms(ms) for c, ms in _pairs(data, "estimated_ms")}
        if estimated and not all(isinstance(o, outcome_lib.Failure) for o in outcomes.values()):
            raise errors.FormatError("an entry must hold measured or estimated times, got both")
        error, env, kind = data.get("error"), data.get("environment", {}), data["device_kind"]
        if not isinstance(env, dict) or not isinstance(kind, str) or not isinstance(error, (str, type(None))):
            raise errors.FormatError("environment must be an object, device_kind and error must be text")
        return cls(
            bound_args=ba,
            device_kind=kind,
            outcomes=outcomes,
            default=_config_from_json(ba, data.get("default")),
            best=_config_from_json(ba, data.get("best")),
            environment=env,
            error=error,
            estimated_ms=estimated,
            extra={k: v for k, v in data.items() if k not in _ENTRY_FIELDS},
        )


def _pairs(data: Mapping[str, Any], name: str) -> list[list[Any]]:
    pairs = data.get(name, [])
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise errors.FormatError(f"{name} must be a list of pairs with a config first")
    return pairs


def _config_to_json(config: Any) -> Any:
    return None if config is None else serialization.encode_fields(config)


def _config_from_json(ba: BoundArguments, data: Any) -> Any:
    if data is None:
        return None
    config = serialization.build_dataclass(ba.op.config_cls, data)
    try:
        hash(config)
    except TypeError as error:  # A list or dict where the class holds a number.
        raise errors.FormatError(f"a config must be hashable, got {str(config)[:80]}") from error
    return config


@dataclasses.dataclass(frozen=True)
class Winner:
    """A measured winner as dispatch sees it.

    Attributes:
      config: the config, as JSON data of its fields.
      median_ms: its median time.
      default_ms: the median time of the default in the same session, if that ran.
      environment: versions, system, cores, timer and time of the session.
    """

    config: Mapping[str, Any]
    median_ms: float
    default_ms: float | None
    environment: Mapping[str, Any]

    @classmethod
    def of(cls, entry: Entry) -> "Winner | None":
        """Returns the winner of an entry, or None if nothing ran."""
        median = entry.median_ms(entry.best)
        if median is None:
            return None
        names = (*environment.STRICT, "timer", "time")
        kept = {name: entry.environment[name] for name in names if name in entry.environment}
        return cls(serialization.encode_fields(entry.best), median, entry.median_ms(entry.default), kept)


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """What an active result says, compared by content.

    Attributes:
      digest: hash of everything that can change a choice.
      winners: (device kind, key) -> winner.
      estimated: (device kind, key) -> the best by estimate, where nothing was measured.
      models: (device kind, op name) -> cost model.
    """

    digest: str
    winners: Mapping[tuple[str, str], Winner]
    estimated: Mapping[tuple[str, str], Estimated]
    models: Mapping[tuple[str, str], model_lib.CostModel]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overlay) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclasses.dataclass(frozen=True, eq=False)
class AutotuningResult:
    """Tuned configs with all that was measured to find them; active inside a `with` block.

    Attributes:
      entries: one tuning session per op, arguments and device.
      models: (device kind, op name) -> cost model, see `fit`.
      unknown: entries of a file that this process cannot understand, as JSON data.
    """

    entries: tuple[Entry, ...] = ()
    models: Mapping[tuple[str, str], model_lib.CostModel] = dataclasses.field(default_factory=dict)
    unknown: tuple[Any, ...] = ()
    _active: threading.local = dataclasses.field(default_factory=threading.local, repr=False)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"AutotuningResult({len(self.entries)} entries, {len(self.models)} models)"

    @property
    def device_kind(self) -> str | None:
        """The device kind of the entries; None if there are none.

        Raises:
          ValueError: if the entries come from several kinds; read `entry.device_kind` instead.
        """
        kinds = sorted({entry.device_kind for entry in self.entries})
        if len(kinds) > 1:
            raise ValueError(f"the entries must come from one device kind to have one, got {kinds}")
        return kinds[0] if kinds else None

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the newest entry."""
        return max((e.environment for e in self.entries), key=lambda env: str(env.get("time", "")), default={})

    @functools.cached_property
    def overlay(self) -> Overlay:
        """What this result says at dispatch."""
        winners = {(e.device_kind, e.key): winner for e in self.entries if (winner := Winner.of(e)) is not None}
        estimated = {(e.device_kind, e.key): found for e in self.entries if (found := Estimated.of(e)) is not None}
        content = [
            _said(winners),
            sorted([*place, model.digest] for place, model in self.models.items()),
            *([_said(estimated)] if estimated else []),
        ]
        return Overlay(serialization.digest(content), winners, estimated, dict(self.models))

    def __enter__(self) -> "AutotuningResult":
        context = options.overlays((*options.overlays.value, self.overlay))
        context.__enter__()
        stack = self._active.__dict__.setdefault("stack", [])
        stack.append(context)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._active.stack.pop().__exit__(*exc)

    def __or__(self, other: "AutotuningResult") -> "AutotuningResult":
        """Merges two results; the right side wins where both measured the same op and arguments.

        What was measured wins over what was estimated, on either side.
        """
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        merged = {(e.device_kind, e.key): e for e in self.entries}
        for entry in other.entries:
            place = (entry.device_kind, entry.key)
            if place not in merged or _replaces(entry, merged[place]):
                merged[place] = entry
        unknown = {serialization.dumps(data): data for data in (*self.unknown, *other.unknown)}
        return AutotuningResult(tuple(merged.values()), {**self.models, **other.models}, tuple(unknown.values()))

    def fit(self) -> "AutotuningResult":
        """Returns this result with a cost model for each op and device that has enough shapes.

        Inside the returned result, shapes that were not tuned run with predicted configs.
        """
        return AutotuningResult(self.entries, {**self.models, **fit_models(self.entries)}, self.unknown)

    def save_to_cache(self) -> None:
        """Writes the entries into the private cache, where dispatch finds their winners from now on."""
        get_runtime().save(self)

    def dumps(self) -> str:
        """Returns the result as JSON text.

        Raises:
          SerializationError: if an entry has an argument that a file cannot carry, for example a lambda.
        """
        models = []
        for (kind, op), model in sorted(self.models.items(), key=lambda item: item[0]):
            buffer = io.BytesIO()
            model.save(buffer)
            models.append({"device_kind": kind, "op": op, "npz": base64.b64encode(buffer.getvalue()).decode("ascii")})
        data = {
            "schema": SCHEMA,
            "version": VERSION,
            "entries": [*(entry.to_json() for entry in self.entries), *self.unknown],
            "models": models,
        }
        return json.dumps(data, indent=1, allow_nan=False)

    def dump(self, file: str | os.PathLike[str] | IO[str]) -> None:
        """Writes the result to a path (atomically) or an open text file."""
        text = self.dumps()
        if isinstance(file, (str, os.PathLike)):
            write_atomically(pathlib.Path(file), text.encode())
        else:
            file.write(text)

    @classmethod
    def loads(cls, text: str | bytes) -> "AutotuningResult":
        """Reads JSON text.

        Entries that this process cannot understand are kept in `unknown`, with one warning.

        Raises:
          FormatError: if the text is no result, or one of a version that this library does not know.
        """
        data = serialization.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise errors.FormatError(f"the text must be a tuning result (schema {SCHEMA!r}), got {str(found)[:60]!r}")
        if data.get("version") != VERSION or not isinstance(data.get("entries"), list):
            raise errors.FormatError(
                f"a tuning result must have version {VERSION} and a list of entries, got version "
                f"{str(data.get('version'))[:20]!r}; update tokamax, or tune again"
            )
        entries, unknown = parse_entries(data["entries"])
        return cls(tuple(entries), _models_from_json(data.get("models", [])), tuple(unknown))

    @classmethod
    def load(cls, file: str | os.PathLike[str] | IO[str]) -> "AutotuningResult":
        """Reads a path or an open file; see `loads`."""
        if isinstance(file, (str, os.PathLike)):
            return cls.loads(pathlib.Path(file).read_bytes())
        return cls.loads(file.read())

    def summary(self) -> Summary:
        """Returns a table, one line per entry: arguments, default and best time, speed-up, config; and totals."""
        return Summary(tuple(map(_row, self.entries)), tuple(sorted(self.models)), len(self.unknown))


def _said(found: Mapping[tuple[str, str], Winner | Estimated]) -> list[Any]:
    """Returns what can change a choice: the configs, and the toolchains that decide whether they are fresh."""
    said = [
        [*place, dict(w.config), {k: v for k, v in w.environment.items() if k in environment.STRICT}]
        for place, w in found.items()
    ]
    return sorted(said, key=serialization.dumps)


def _replaces(new: Entry, old: Entry) -> bool:
    """Whether an entry takes the place of another: measured before estimated, then one with a config."""
    was_measured = bool(new.outcomes) and not new.is_estimated, bool(old.outcomes) and not old.is_estimated
    if was_measured[0] != was_measured[1]:
        return was_measured[0]
    return new.best is not None


def _row(entry: Entry) -> Row:
    ba = entry.bound_args
    failures = [o.stage for o in entry.outcomes.values() if isinstance(o, outcome_lib.Failure)]
    time = entry.environment.get("time")
    return Row(
        op=ba.op.registered_name(),
        arguments=ba.shown_arguments,
        device_kind=entry.device_kind,
        config=None if entry.best is None else describe_config(entry.best),
        default_ms=entry.median_ms(entry.default),
        best_ms=entry.median_ms(entry.best),
        measured=len(entry.outcomes) - len(failures),
        failed=collections.Counter(failures),
        error=entry.error,
        estimated_ms=entry.estimated_ms.get(entry.best),
        time=None if time is None else str(time),
    )


def fit_models(entries: Iterable[Entry]) -> dict[tuple[str, str], model_lib.CostModel]:
    """Fits one cost model per device kind and op; those with too few shapes are left out, with a warning each."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_kind, entry.bound_args.op.registered_name()), []).append(entry)
    models = {}
    for (kind, op), group in groups.items():
        problems = dataset.problems_from_entries(group)
        if len({problem.group for problem in problems}) < model_lib.MIN_GROUPS:
            warnings.warn(
                f"a cost model of {op} needs at least {model_lib.MIN_GROUPS} tuned shapes, got {len(problems)}; "
                "tune more shapes and call fit() again",
                stacklevel=3,
            )
            continue
        models[kind, op] = model_lib.CostModel().fit(problems, devices.facts(kind))
    return models


def describe_config(config: Any) -> str:
    """Returns a config on one line, without the name of its class: `block_q=128, block_kv=512`."""
    if not dataclasses.is_dataclass(config):
        return repr(config)
    return ", ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config)) or "-"


def parse_entries(items: Iterable[Any]) -> tuple[list[Entry], list[Any]]:
    """Reads entries one by one; returns those understood and the others as they came, with one warning for all."""
    entries, unknown, reasons = [], [], []
    for item in items:
        try:
            entries.append(Entry.from_json(item))
        except errors.FormatError as error:
            unknown.append(item)
            reasons.append(str(error))
    if reasons:
        warnings.warn(
            f"{len(reasons)} of {len(reasons) + len(entries)} entries are not understood here and are not used (they "
            f"are kept when the result is written again); the first: {reasons[0]}",
            stacklevel=3,
        )
    return entries, unknown


def _models_from_json(items: Any) -> dict[tuple[str, str], model_lib.CostModel]:
    models = {}
    for item in items if isinstance(items, list) else []:
        try:
            raw = base64.b64decode(item["npz"], validate=True)
            models[str(item["device_kind"]), str(item["op"])] = model_lib.CostModel.load(io.BytesIO(raw))
        except (errors.FormatError, KeyError, TypeError, ValueError) as error:
            warnings.warn(f"a cost model in the file is not understood here and is not used: {error}", stacklevel=3)
    return models
