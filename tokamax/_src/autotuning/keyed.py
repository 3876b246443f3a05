"""Files that dispatch looks keys up in: a head that says what they are of, then one line per key, in a fixed order."""

import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from tokamax._src import errors, serialization

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Form(Generic[_T]):
    """A kind of such files.

    Attributes:
      schema: its name.
      version: its version; a file of another one is not used.
      made: how it came to be, in words that a device follows: `measured on`.
      to_json: returns what is kept of a key as JSON data.
      from_json: reads that back; raises TypeError, ValueError, KeyError or OverflowError if it is damaged.
    """

    schema: str
    version: int
    made: str
    to_json: Callable[[_T], Any]
    from_json: Callable[[Any], _T]

    def text(self, found: Mapping[str, _T], device_kind: str, op: str) -> str:
        """Returns the text of a file of one op and device."""
        head = {"schema": self.schema, "version": self.version, "device_kind": device_kind, "op": op}
        items = [[key, self.to_json(value)] for key, value in sorted(found.items())]
        return "[" + ",\n".join(map(serialization.dumps, (head, *items))) + "]\n"

    def read(self, path: pathlib.Path, device_kind: str) -> dict[str, _T]:
        """Returns key -> what is kept of it; a damaged file or item is a miss, with one warning."""
        try:
            head, *items = serialization.loads(path.read_bytes())
            if (head["schema"], head["version"]) != (self.schema, self.version):
                raise errors.FormatError(f"schema must be {self.schema} version {self.version}")
            kind = head.get("device_kind")
        except FileNotFoundError:
            return {}
        except (OSError, errors.FormatError, TypeError, KeyError, ValueError, AttributeError) as error:
            warnings.warn(f"{path} is damaged or of another version and is not used: {error}", stacklevel=3)
            return {}
        if kind != device_kind:
            warnings.warn(f"{path} was {self.made} {kind!r} and must be of {device_kind!r}: not used", stacklevel=3)
            return {}
        found, bad = {}, 0
        for item in items:
            try:
                key, body = item
                value = self.from_json(body)
                if not isinstance(key, str):
                    raise TypeError
                found[key] = value
            except (TypeError, ValueError, KeyError, OverflowError):
                bad += 1
        if bad:
            warnings.warn(f"{bad} of {len(items)} entries of {path} are damaged and are not used", stacklevel=3)
        return found
