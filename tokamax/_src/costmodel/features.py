"""Features of (arguments, config) pairs for any op, without help from its author.

Notation: `d` is a dimension of an array argument, `t` a numeric config field that may tile it. A tile count is
`ceil(d / t)`; padding waste is `ceil(d / t) * t / d - 1`. Sizes enter as log2, so that trees see ratios.

Arguments are first described by flat scalars: numbers (dimensions, integers) and categories (ranks, dtypes, flags).
What the training problems showed of each scalar is the domain; arguments outside of it are not to be predicted.
"""

import dataclasses
import enum
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from tokamax._src import devices, errors, serialization, shapes

_LEAST_TILE = 8  # A field that never reaches 8 counts warps or stages; it does not tile an axis.
_MAX_PAIRED_DIMENSIONS = 8
_MAX_PAIRED_CATEGORIES = 8
_MAX_ALIGNMENT = 8
_LARGEST = float(np.finfo(np.float32).max)

Scalar = float | int | str
Arguments = Mapping[str, Any]


def describe(arguments: Arguments) -> dict[str, Scalar]:
    """Describes arguments by flat scalars; numbers are int or float, categories are str.

    An array `a` gives `a` (its rank), `a.dtype`, `a[0]`, `a[1]`, ... and, inside vmaps, `a.vmap` (their sizes'
    product). Other leaves give their kind and value. Containers are entered by path.
    """
    out: dict[str, Scalar] = {}
    for name in sorted(arguments):
        _describe(name, arguments[name], out)
    return out


def _describe(path: str, value: Any, out: dict[str, Scalar]) -> None:
    if isinstance(value, int) and not isinstance(value, (bool, enum.Enum)):
        out[path] = "int"
        out[f"{path}.value"] = value
    elif shapes.is_array(value):
        _describe_array(path, shapes.spec_of(value), out)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _describe(f"{path}.{key}", value[key], out)
    elif isinstance(value, (tuple, list)):
        out[path] = f"length {len(value)}"
        for i, item in enumerate(value):
            _describe(f"{path}.{i}", item, out)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _describe(f"{path}.{field.name}", getattr(value, field.name), out)
    else:
        leaves, treedef = jax.tree.flatten(value)
        if value is None or (len(leaves) == 1 and leaves[0] is value):
            out[path] = _category(value)
        else:
            out[path] = str(treedef)[:200]
            for i, leaf in enumerate(leaves):
                _describe(f"{path}.{i}", leaf, out)


def _describe_array(path: str, spec: shapes.ArraySpec, out: dict[str, Scalar]) -> None:
    out[path] = f"rank {spec.ndim}"
    out[f"{path}.dtype"] = shapes.dtype_name(spec.dtype)
    out[f"{path}.vmap"] = math.prod(spec.batch)
    for axis, size in enumerate(spec.shape):
        out[f"{path}[{axis}]"] = size


def _category(value: Any) -> str:
    """Names a value that is not to be read as a quantity."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        # A scale or a cap matters by being there; its value does not change the program's speed.
        return "float nan" if math.isnan(value) else f"float {(value > 0) - (value < 0)}"
    if isinstance(value, str):
        return f"text {value}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (np.dtype, type)):
        try:
            return f"dtype {shapes.dtype_name(value)}"
        except TypeError:
            pass
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"value {name}"


def dimensions(scalars: Mapping[str, Scalar]) -> dict[str, int]:
    """Returns the dimensions among described scalars."""
    return {name: int(value) for name, value in scalars.items() if name.endswith("]")}


def of_op(ba: Any, configs: Sequence[Any]) -> tuple[Mapping[str, float], ...] | None:
    """Returns the op's own features of each config of bound arguments; None if it has none.

    If it raises, that is a mistake of its author, which costs predictions and nothing else: a warning, and None.
    """
    try:
        own = tuple(ba.op._get_cost_features(ba, config) or {} for config in configs)
    except Exception as error:
        warnings.warn(
            f"_get_cost_features raised {type(error).__name__}: {error}; cost models do without it for {ba!r}",
            stacklevel=2,
        )
        return None
    return own if any(own) else None


def config_fields(config: Any) -> dict[str, Any]:
    """Returns a config (a dataclass or a dict) as a plain dict of scalars."""
    if isinstance(config, Mapping):
        return dict(config)
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise errors.ArgumentError(f"a config must be a dataclass or a dict, got {type(config).__qualname__}")
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def config_text(config: Any) -> str:
    """Returns a text that is equal for equal configs, in every process."""
    fields = config_fields(config)
    return ",".join(f"{name}={_field_text(fields[name])}" for name in sorted(fields))


def _field_text(value: Any) -> str:
    return str(value) if _is_number(value) else _category(value) if not isinstance(value, tuple) else repr(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum))


def _log2(value: Scalar | None) -> float:
    if value is None:
        return math.nan
    value = float(value)
    return math.copysign(math.log2(max(abs(value), 1.0)), value) if abs(value) >= 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Field:
    """What training configs showed of one config field.

    Attributes:
      low: least number seen; infinite if there was none.
      high: largest number seen.
      none: whether None was seen (it stands for "the whole axis").
      categories: the other values seen, as text.
      tiles: the dimension that the field seems to tile, if any.
    """

    low: float = math.inf
    high: float = -math.inf
    none: bool = False
    categories: tuple[str, ...] = ()
    tiles: str | None = None

    @property
    def numeric(self) -> bool:
        """Whether numbers were seen."""
        return self.low <= self.high

    def knows(self, value: Any) -> bool:
        """Whether a value lies in what was seen."""
        if _is_number(value):
            return self.low <= value <= self.high
        return self.none if value is None else _field_text(value) in self.categories


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The feature layout of one op, decided from its training problems.

    Attributes:
      numbers: name -> (least, largest, whether it varied) of each numeric scalar seen.
      categories: name -> values seen, sorted; `""` stands for "was absent".
      twins: scalars that always equalled another one wherever they were present, and that other one.
      fields: what was seen of each config field.
      extra: names of the op's own features.
      names: the columns, in order; those that never varied or repeat another are left out.
    """

    numbers: dict[str, tuple[float, float, bool]]
    categories: dict[str, tuple[str, ...]]
    twins: dict[str, str]
    fields: dict[str, Field]
    extra: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the whole layout."""
        return serialization.digest(self.to_json())

    @property
    def own_numbers(self) -> tuple[str, ...]:
        """The numeric scalars that are no twin of another, in order."""
        return tuple(name for name in self.numbers if name not in self.twins)

    @property
    def own_categories(self) -> tuple[str, ...]:
        """The categories that are no twin of another and that varied."""
        return tuple(n for n, seen in self.categories.items() if n not in self.twins and len(seen) > 1)

    @classmethod
    def learn(
        cls,
        problems: Sequence[tuple[Mapping[str, Scalar], Sequence[Any]]],
        extra: Sequence[str] = (),
        tiles: Mapping[str, str] | None = None,
    ) -> "FeatureSpec":
        """Learns the domain and the candidate columns; `pruned` then drops columns.

        Args:
          problems: (described arguments, configs) of each training problem.
          extra: names of the op's own features.
          tiles: config field -> dimension that it tiles, such as `x[0]`; which one the other fields tile is learned.
        """
        scalars = [s for s, _ in problems]
        names = sorted(set().union(*scalars))
        table = {name: [s.get(name) for s in scalars] for name in names}
        numbers, categories = {}, {}
        for name, column in table.items():
            if any(isinstance(v, str) for v in column):
                categories[name] = tuple(sorted({"" if v is None else str(v) for v in column}))
            else:
                seen = [float(v) for v in column if v is not None]
                numbers[name] = (min(seen), max(seen), min(seen) < max(seen))
        twins = _twins(table, [n for n in names if n in numbers])
        twins |= _twins(table, [n for n in names if n in categories])
        spec = cls(numbers, categories, twins, {}, tuple(extra))
        return dataclasses.replace(spec, fields=_learn_fields(problems, spec, tiles or {}))

    def pruned(self, matrix: np.ndarray, names: Sequence[str]) -> tuple["FeatureSpec", np.ndarray]:
        """Keeps the columns that vary and repeat no earlier one.

        Args:
          matrix: all columns over all training rows, `[rows, columns]`.
          names: their names.

        Returns:
          The spec with `names` set, and the kept columns.
        """
        keep: list[int] = []
        seen: set[bytes] = set()
        for i in range(matrix.shape[1]):
            column = np.ascontiguousarray(matrix[:, i])
            missing = np.isnan(column)
            varies = 0 < missing.sum() < len(column) or (
                not missing.any() and len(column) > 0 and column.min() < column.max()
            )
            if varies and column.tobytes() not in seen:
                seen.add(column.tobytes())
                keep.append(i)
        return dataclasses.replace(self, names=tuple(names[i] for i in keep)), matrix[:, keep]

    def mismatch(self, scalars: Mapping[str, Scalar], octaves: float = 1.0) -> str | None:
        """Says why arguments lie outside of what was seen; None if they do not.

        Args:
          scalars: described arguments.
          octaves: how far beyond the seen range a number that varied may lie, as a power of two.
        """
        for name, value in scalars.items():
            if name not in self.numbers and name not in self.categories:
                return f"{name} was not among the training arguments"
            if name in self.numbers and isinstance(value, str):
                return f"{name} was a number in training, now it is {value}"
            if name in self.categories and str(value) not in self.categories[name]:
                return f"{name} is {value}, training saw {', '.join(v or 'none' for v in self.categories[name][:5])}"
            if name in self.numbers:
                low, high, varied = self.numbers[name]
                margin = octaves if varied else 0.0
                if not _log2(low) - margin <= _log2(value) <= _log2(high) + margin:
                    return f"{name} is {value}, training saw {low:g} to {high:g}"
            twin = self.twins.get(name)
            if twin is not None and scalars.get(twin) != value:
                return f"{name} is {value}, but in training it always equalled {twin}, now {scalars.get(twin)}"
        for name, seen in self.categories.items():
            if name not in scalars and "" not in seen:
                return f"{name} is absent, in training it was always present"
        return None

    def kin(self, scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns described arguments with each category value that was never seen replaced by one that was."""
        unseen = {n: seen for n, seen in self.categories.items() if n in scalars and str(scalars[n]) not in seen}
        return {**scalars, **{name: seen[-1] for name, seen in unseen.items()}}

    def known(self, configs: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns which configs have the training configs' fields and values in their range, `[configs]`."""
        # The values of a field are few, the configs may be thousands.
        knows = functools.lru_cache(typed=True)(lambda name, value: self.fields[name].knows(value))
        names = self.fields.keys()
        return np.array([c.keys() == names and all([knows(n, c[n]) for n in names]) for c in configs], dtype=bool)

    def point(self, scalars: Mapping[str, Scalar]) -> tuple[np.ndarray, np.ndarray]:
        """Returns arguments as a point: log2 numbers `[numbers]` (nan: absent) and category codes `[categories]`."""
        numbers = np.array([_log2(scalars.get(n)) for n in self.own_numbers], dtype=np.float32)
        codes = [self._code(n, scalars) for n in self.own_categories]
        return numbers, np.array(codes, dtype=np.int16)

    def _code(self, name: str, scalars: Mapping[str, Scalar]) -> int:
        seen = self.categories[name]
        value = str(scalars.get(name, ""))
        return seen.index(value) if value in seen else -1

    def matrix(
        self,
        scalars: Mapping[str, Scalar],
        configs: Sequence[Mapping[str, Any]],
        device: devices.DeviceFacts,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> np.ndarray:
        """Returns the features of each config for one problem, float32 `[configs, names]`.

        Args:
          scalars: described arguments.
          configs: configs as dicts, see `config_fields`.
          device: facts of the device.
          extra: the op's own features of each config.
        """
        columns = self.columns(scalars, configs, device, extra)
        out = np.empty((len(self.names), len(configs)), dtype=np.float32)
        for i, name in enumerate(self.names):
            # An optional array that is absent has no columns of its own.
            out[i] = columns.get(name, np.nan)
        return out.T

    def columns(
        self,
        scalars: Mapping[str, Scalar],
        configs: Sequence[Mapping[str, Any]],
        device: devices.DeviceFacts,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Returns all candidate columns by name, each a number or `[configs]`."""
        out: dict[str, Any] = self._argument_columns(scalars)
        out |= self._config_columns(scalars, configs, device)
        for name in self.extra:
            values = np.array([float(e.get(name, math.nan)) for e in extra or ()] or math.nan)
            out[f"op:{name}"] = np.clip(values, -_LARGEST, _LARGEST)
        return out

    def _argument_columns(self, scalars: Mapping[str, Scalar]) -> dict[str, float]:
        out: dict[str, float] = {}
        for name in self.own_numbers:
            value = scalars.get(name)
            out[f"log2({name})"] = _log2(value)
            if name.endswith(("]", ".value")):  # Integers may be strides or offsets, which are aligned or not.
                out[f"align({name})"] = math.nan if value is None else _alignment(int(value))
        for name in self.own_categories:
            out[f"is({name})"] = self._code(name, scalars)
        # What hangs on two flags at once (tf32 with one layout, say) hides behind splits that alone gain nothing.
        for a, b in itertools.combinations(self.own_categories[:_MAX_PAIRED_CATEGORIES], 2):
            out[f"is({a}, {b})"] = self._code(a, scalars) * len(self.categories[b]) + self._code(b, scalars)
        own = [scalars.get(n) for n in self.own_numbers if n.endswith("]")]
        out["log2(volume)"] = sum(_log2(v) for v in own if v is not None)
        for name, sizes, width in _arrays(scalars):
            out[f"log2(size of {name})"] = sum(_log2(s) for _, s in sizes)
            out[f"width({name})"] = width
        return out

    def _config_columns(
        self, scalars: Mapping[str, Scalar], configs: Sequence[Mapping[str, Any]], device: devices.DeviceFacts
    ) -> dict[str, Any]:
        out: dict[str, Any] = {}
        numeric: dict[str, np.ndarray] = {}
        for name, field in self.fields.items():
            values = [c.get(name) for c in configs]
            if field.categories:
                codes = {v: i for i, v in enumerate(field.categories)}
                out[f"is({name})"] = np.array(
                    [-1 if v is None or _is_number(v) else codes.get(_field_text(v), -1) for v in values], float
                )
            if field.none:
                out[f"none({name})"] = np.array([v is None for v in values], float)
            if field.numeric:
                numeric[name] = np.array([float(v) if _is_number(v) else math.nan for v in values])
        tiles, sizes = self._tiles(scalars, numeric)
        logs = {n: np.log2(1.0 + tiles.get(n, v)) for n, v in numeric.items()}
        out |= {f"log2({n})": v for n, v in logs.items()}
        out |= self._pair_columns(scalars, numeric)
        out |= self._product_columns(scalars, tiles, sizes, logs, device)
        return out

    def _tiles(
        self, scalars: Mapping[str, Scalar], numeric: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the values of the tiling fields, with None replaced by the whole dimension, and that dimension."""
        tiles, sizes = {}, {}
        for name, values in numeric.items():
            size = scalars.get(self.fields[name].tiles or "")
            if isinstance(size, (int, float)):
                sizes[name] = float(max(size, 1))
                tiles[name] = np.where(np.isnan(values), sizes[name], np.maximum(values, 1.0))
        return tiles, sizes

    def _paired(self) -> list[str]:
        """The dimensions that are paired with tile fields: those that varied, widest range first."""
        varied = [n for n in self.own_numbers if n.endswith("]") and self.numbers[n][2]]
        varied.sort(key=lambda n: self.numbers[n][0] / max(self.numbers[n][1], 1))
        return varied[:_MAX_PAIRED_DIMENSIONS]

    def _pair_columns(self, scalars: Mapping[str, Scalar], numeric: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        fields = [n for n in numeric if self.fields[n].high >= _LEAST_TILE]
        for dimension in self._paired():
            size = scalars.get(dimension)
            d = float(max(size, 1)) if isinstance(size, (int, float)) else math.nan
            for name in fields:
                t = np.where(np.isnan(numeric[name]), d, np.maximum(numeric[name], 1.0))
                count = np.ceil(d / t)
                out[f"log2(count {dimension}/{name})"] = np.log2(count)
                out[f"waste({dimension}/{name})"] = count * t / d - 1.0
        return out

    def _product_columns(
        self,
        scalars: Mapping[str, Scalar],
        tiles: Mapping[str, np.ndarray],
        sizes: Mapping[str, float],
        logs: Mapping[str, np.ndarray],
        device: devices.DeviceFacts,
    ) -> dict[str, Any]:
        out: dict[str, Any] = {}
        log_tiles = {n: np.log2(t) for n, t in tiles.items()}
        counts = {n: np.ceil(sizes[n] / t) for n, t in tiles.items()}
        names = list(tiles)
        groups = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        groups += [tuple(names)] if len(names) > 2 else []
        for group in groups:
            label = "*".join(group)
            grid = np.prod([counts[n] for n in group], axis=0)
            waves = grid / max(device.cores, 1)
            out[f"log2(tile {label})"] = sum(log_tiles[n] for n in group)
            out[f"log2(grid {label})"] = np.log2(grid)
            out[f"waves({label})"] = np.ceil(waves)
            out[f"fill({label})"] = waves / np.ceil(waves)
        if not tiles:
            return out
        footprint = self._footprint(scalars, tiles)
        volume = sum(log_tiles.values())
        out["log2(footprint)"] = footprint
        for name in logs:
            if name not in tiles:
                out[f"log2(footprint*{name})"] = footprint + logs[name]
                out[f"log2(tile/{name})"] = volume - logs[name]
        return out

    def _footprint(self, scalars: Mapping[str, Scalar], tiles: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns log2 of the bytes of all arrays that one tile step touches, `[configs]`.

        The device's cache sizes would only shift this by a constant, which no tree can see.
        """
        by_dimension = {self.fields[n].tiles: t for n, t in tiles.items()}
        total: Any = 1.0
        for _, sizes, width in _arrays(scalars):
            block: Any = width
            for dimension, size in sizes:
                tile = by_dimension.get(self.twins.get(dimension, dimension))
                block = block * (size if tile is None else np.minimum(tile, size))
            total = total + block
        return np.log2(total)

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as plain JSON data."""
        fields = {}
        for name, f in self.fields.items():
            bounds = [f.low, f.high] if f.numeric else None
            fields[name] = {"bounds": bounds, "none": f.none, "categories": list(f.categories), "tiles": f.tiles}
        return {
            "numbers": {n: list(v) for n, v in self.numbers.items()},
            "categories": {n: list(v) for n, v in self.categories.items()},
            "twins": self.twins,
            "fields": fields,
            "extra": list(self.extra),
            "names": list(self.names),
        }

    @classmethod
    def from_json(cls, data: Any) -> "FeatureSpec":
        """Reads the layout back.

        Raises:
          FormatError: if the data is not what `to_json` writes.
        """
        try:
            fields = {}
            for name, f in sorted(data["fields"].items()):
                low, high = map(float, f["bounds"] or (math.inf, -math.inf))
                tiles = None if f["tiles"] is None else str(f["tiles"])
                fields[str(name)] = Field(low, high, bool(f["none"]), tuple(map(str, f["categories"])), tiles)
            spec = cls(
                {str(n): (float(a), float(b), bool(c)) for n, (a, b, c) in sorted(data["numbers"].items())},
                {str(n): tuple(map(str, v)) for n, v in sorted(data["categories"].items())},
                {str(n): str(v) for n, v in sorted(data["twins"].items())},
                fields,
                tuple(map(str, data["extra"])),
                tuple(map(str, data["names"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise errors.FormatError(f"a feature layout must hold numbers, categories and fields: {error!r}") from error
        return spec


def _alignment(size: int) -> float:
    """Returns how often 2 divides a size, at most 8 times."""
    return float(min((size & -size).bit_length() - 1, _MAX_ALIGNMENT)) if size > 0 else float(_MAX_ALIGNMENT)


def _arrays(scalars: Mapping[str, Scalar]) -> Iterable[tuple[str, list[tuple[str, int]], int]]:
    """Yields (name, [(dimension, size)], bytes of an element) of each array among described scalars."""
    for key in [k for k in scalars if k.endswith(".dtype")]:
        name = key.removesuffix(".dtype")
        if str(scalars.get(name, "")).startswith("rank "):
            rank = int(str(scalars[name])[5:])
            sizes = [(f"{name}[{i}]", int(scalars[f"{name}[{i}]"])) for i in range(rank)]
            yield name, sizes, _width(str(scalars[key]))


def _width(dtype: str) -> int:
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())[:3]
    return max(int(digits) // 8, 1) if digits else 1


def _twins(table: Mapping[str, list[Any]], names: Sequence[str]) -> dict[str, str]:
    """Finds scalars that equal an earlier one wherever they are present."""
    twins: dict[str, str] = {}
    # The scalar that is present most often comes first, so that a rare one is a twin of a common one.
    order = sorted(names, key=lambda n: (sum(v is None for v in table[n]), n))
    owners: list[str] = []
    for name in order:
        column = table[name]
        for owner in owners:
            if all(a is None or a == b for a, b in zip(column, table[owner], strict=True)):
                twins[name] = owner
                break
        else:
            owners.append(name)
    return twins


def _learn_fields(
    problems: Sequence[tuple[Mapping[str, Scalar], Sequence[Any]]], spec: FeatureSpec, tiles: Mapping[str, str]
) -> dict[str, Field]:
    names = sorted({name for _, configs in problems for c in configs for name in c})
    fields = {}
    for name in names:
        values = [c.get(name) for _, configs in problems for c in configs]
        numbers = [float(v) for v in values if _is_number(v)]
        named = tiles.get(name)
        texts = {_field_text(v) for v in values if v is not None and not _is_number(v)}
        fields[name] = Field(
            low=min(numbers, default=math.inf),
            high=max(numbers, default=-math.inf),
            none=any(v is None for v in values),
            categories=tuple(sorted(texts)),
            tiles=spec.twins.get(named, named) if named in spec.numbers else _tiled_dimension(name, problems, spec),
        )
    return fields


def _tiled_dimension(
    name: str, problems: Sequence[tuple[Mapping[str, Scalar], Sequence[Any]]], spec: FeatureSpec
) -> str | None:
    """Guesses which dimension a field tiles.

    Spaces cap a tile by its dimension. So, over the problems, the largest value of the field follows the dimension
    as long as that is small: the dimension that explains the largest values best is the tiled one.
    """
    largest = np.array(
        [max((float(c[name]) for c in cs if _is_number(c.get(name))), default=math.nan) for _, cs in problems]
    )
    usable = ~np.isnan(largest) & (largest > 0)
    if not usable.any() or largest[usable].max() < _LEAST_TILE or len(set(largest[usable])) < 2:
        return None
    goal = np.log2(largest[usable])
    best, best_score = None, 0.3
    for dimension in spec.own_numbers:
        if not dimension.endswith("]"):
            continue
        sizes = np.array([_log2(s.get(dimension)) for s, _ in problems])[usable]
        capped = np.minimum(sizes, goal.max())
        if np.isnan(sizes).any() or capped.std() == 0:
            continue
        score = float(np.corrcoef(capped, goal)[0, 1])
        if score > best_score + 1e-6:
            best, best_score = dimension, score
    return best
