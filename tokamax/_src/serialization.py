"""Values <-> canonical JSON, through a table of known types; and digests of that text.

Plain JSON values stand for themselves. Anything else is an object with one `$tag`: `{"$array": "bf16[8,128]"}`,
`{"$tuple": [...]}`, `{"$enum": [type, member]}`, `{"$data": [type, {field: value}]}`, ... Reading looks names up in
`registry`; it imports nothing and calls nothing but the constructors of dataclasses known there.

A lambda or local function has no name that another process could look up. `encode(..., local=True)` names it by
a token that only this process understands (keys and program metadata may carry it); for files it is an error.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tokamax._src import errors, registry, shapes

_MAX_DEPTH = 64
_treedefs: dict[str, Any] = {}
_local: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()

registry.remember(jax.lax.Precision, "jax.lax.Precision")
registry.remember(jax.lax.DotAlgorithmPreset, "jax.lax.DotAlgorithmPreset")
for _name in ("relu", "gelu", "silu", "sigmoid", "softplus", "elu", "leaky_relu", "relu6", "soft_sign"):
    registry.remember(getattr(jax.nn, _name), f"jax.nn.{_name}")
registry.remember(jax.numpy.tanh, "jax.numpy.tanh")


def dumps(value: Any) -> str:
    """Returns plain JSON data as canonical text: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def loads(text: str | bytes) -> Any:
    """Parses JSON text.

    Raises:
      FormatError: if it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.FormatError(f"text must be JSON, got {str(text[:40])!r}... ({error})") from error


def digest(value: Any) -> str:
    """Returns a short hash of plain JSON data, equal in every process."""
    return hashlib.sha256(dumps(value).encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _encode_dict(value: dict[Any, Any], local: bool) -> Any:
    if all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {k: encode(v, local=local) for k, v in value.items()}
    return {"$dict": [[encode(k, local=local), encode(v, local=local)] for k, v in value.items()]}


def _encode_function(value: Any, local: bool) -> Any:
    name = registry.name_of(value)
    if "<lambda>" not in name and "<locals>" not in name:
        return {"$name": registry.remember(value)}
    if not local:
        raise errors.SerializationError(
            f"a value in a file must have a name that another process can look up, got {name}; "
            "define the function at the top level of a module"
        )
    token = f"{name}@{id(value):x}"
    _local[token] = value
    return {"$local": token}


def _encode_dataclass(value: Any, local: bool) -> Any:
    fields = {f.name: encode(getattr(value, f.name), local=local) for f in dataclasses.fields(value) if f.init}
    return {"$data": [registry.remember(type(value)), fields]}


def encode(value: Any, *, local: bool = False) -> Any:
    """Turns a value into JSON data.

    Args:
      value: the value; arrays become their shape and dtype.
      local: whether lambdas and local functions may be named by a token of this process.

    Raises:
      SerializationError: if the value cannot be written.
    """
    if value is None or (isinstance(value, (bool, str)) and type(value) in (bool, str)):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return _encode_float(value)
    if shapes.is_array(value):
        return {"$array": str(shapes.spec_of(value))}
    if isinstance(value, list) and type(value) is list:
        return [encode(v, local=local) for v in value]
    if isinstance(value, tuple):
        items = [encode(v, local=local) for v in value]
        if type(value) is tuple:
            return {"$tuple": items}
        return {"$namedtuple": [registry.remember(type(value)), items]}
    if isinstance(value, dict):
        return _encode_dict(value, local)
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted((encode(v, local=local) for v in value), key=dumps)}
    if isinstance(value, enum.Enum):
        return {"$enum": [registry.remember(type(value)), value.name]}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": shapes.dtype_name(value)}
    if isinstance(value, np.generic):
        return encode(value.item(), local=local)
    if isinstance(value, functools.partial):
        parts = [encode(v, local=local) for v in (value.func, list(value.args), dict(value.keywords))]
        return {"$partial": parts}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_dataclass(value, local)
    if _is_scalar_type(value):
        return {"$dtype": shapes.dtype_name(getattr(value, "dtype"))}  # noqa: B009
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or hasattr(value, "__qualname__"):
        return _encode_function(value, local)
    leaves, treedef = jax.tree.flatten(value)
    if not jax.tree_util.treedef_is_leaf(treedef):
        _treedefs[str(treedef)] = treedef
        return {"$tree": [str(treedef), [encode(leaf, local=local) for leaf in leaves]]}
    raise errors.SerializationError(
        f"an op argument must be an array, a number, text, a container, a dtype, an enum, a frozen dataclass or a "
        f"named function, got {type(value).__qualname__}"
    )


def _is_scalar_type(value: Any) -> bool:
    """Whether this is `jnp.float32` and the like, which are callables with a `dtype`."""
    return type(value).__name__ == "_ScalarMeta" and hasattr(value, "dtype")


def _decode_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise errors.FormatError(f"expected a list, got {type(value).__name__}")
    return value


def _decode_pair(value: Any) -> tuple[Any, Any]:
    if len(_decode_list(value)) != 2:
        raise errors.FormatError(f"expected a pair, got {len(value)} items")
    return value[0], value[1]


def _known(name: Any, kind: Callable[[Any], bool], what: str) -> Any:
    value = registry.recall(str(name))
    if not kind(value):
        raise errors.FormatError(f"{str(name)[:80]!r} must name {what}")
    return value


def _decode_enum(body: Any, depth: int) -> Any:
    name, member = _decode_pair(body)
    cls = _known(name, lambda v: isinstance(v, type) and issubclass(v, enum.Enum), "an enum")
    if member not in cls.__members__:
        raise errors.FormatError(f"{name} must have the member {str(member)[:40]!r}; it has {sorted(cls.__members__)}")
    return cls[member]


def _decode_data(body: Any, depth: int) -> Any:
    name, fields = _decode_pair(body)
    cls = _known(name, lambda v: isinstance(v, type) and dataclasses.is_dataclass(v), "a dataclass")
    return build_dataclass(cls, fields, depth + 1)


def _decode_namedtuple(body: Any, depth: int) -> Any:
    name, items = _decode_pair(body)
    cls = _known(name, lambda v: isinstance(v, type) and hasattr(v, "_make"), "a named tuple")
    return _built(cls._make, [_decode(v, depth + 1) for v in _decode_list(items)])


def _decode_partial(body: Any, depth: int) -> Any:
    if len(_decode_list(body)) != 3:
        raise errors.FormatError("a partial must have a function, arguments and keywords")
    function, args, keywords = (_decode(v, depth + 1) for v in body)
    if not callable(function) or not isinstance(args, list) or not isinstance(keywords, dict):
        raise errors.FormatError("a partial must have a function, arguments and keywords")
    return functools.partial(function, *args, **keywords)


def _decode_local(body: Any, depth: int) -> Any:
    value = _local.get(str(body))
    if value is None:
        raise errors.FormatError(f"{str(body)[:80]!r} was a local function of another process, or is gone")
    return value


def _decode_tree(body: Any, depth: int) -> Any:
    name, leaves = _decode_pair(body)
    treedef = _treedefs.get(str(name))
    if treedef is None:
        raise errors.FormatError(f"the pytree type {str(name)[:80]!r} was not used in this process")
    return _built(treedef.unflatten, [_decode(v, depth + 1) for v in _decode_list(leaves)])


def _decode_dict(body: Any, depth: int) -> Any:
    pairs = [_decode_pair(v) for v in _decode_list(body)]
    return _built(dict, [(_decode(k, depth + 1), _decode(v, depth + 1)) for k, v in pairs])


def _built(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a constructor; whatever it objects to is an error of the file."""
    try:
        return make(*args, **kwargs)
    except errors.FormatError:
        raise
    except Exception as error:
        raise errors.FormatError(f"{make} refused its fields: {error}") from error


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$float": lambda body, depth: _built(float, body),
    "$array": lambda body, depth: shapes.ArraySpec.parse(str(body)),
    "$dtype": lambda body, depth: shapes.dtype_from_name(str(body)),
    "$tuple": lambda body, depth: tuple(_decode(v, depth + 1) for v in _decode_list(body)),
    "$set": lambda body, depth: _built(frozenset, [_decode(v, depth + 1) for v in _decode_list(body)]),
    "$name": lambda body, depth: _known(body, callable, "a function or class"),
    "$dict": _decode_dict,
    "$enum": _decode_enum,
    "$data": _decode_data,
    "$namedtuple": _decode_namedtuple,
    "$partial": _decode_partial,
    "$local": _decode_local,
    "$tree": _decode_tree,
}


def _decode(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise errors.FormatError(f"values must not nest deeper than {_MAX_DEPTH}")
    if isinstance(value, list):
        return [_decode(v, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    tags = [k for k in value if k.startswith("$")]
    if not tags:
        return {k: _decode(v, depth + 1) for k, v in value.items()}
    if len(value) != 1 or tags[0] not in _DECODERS:
        raise errors.FormatError(f"a tagged value must have one known tag, got {sorted(value)[:3]}")
    return _DECODERS[tags[0]](value[tags[0]], depth)


def decode(value: Any) -> Any:
    """Turns JSON data back into the value.

    Raises:
      FormatError: if it is not what `encode` writes, or names something unknown in this process.
    """
    return _decode(value, 0)


def build_dataclass(cls: type, fields: Any, depth: int = 0) -> Any:
    """Builds a dataclass from the JSON data of its fields; fields that are absent take their defaults.

    Raises:
      FormatError: for unknown or missing fields, or if the class refuses the values.
    """
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    if not isinstance(fields, dict) or not set(fields) <= names:
        got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise errors.FormatError(f"{cls.__qualname__} must have fields among {sorted(names)}, got {got}")
    return _built(cls, **{k: _decode(v, depth + 1) for k, v in fields.items()})


def encode_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass (a config) as JSON data, without its type.

    Raises:
      SerializationError: if it is no dataclass or a field cannot be written.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise errors.SerializationError(f"a config must be a frozen dataclass, got {type(value).__qualname__}")
    return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
