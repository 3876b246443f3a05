"""XSpace files, which `jax.profiler` writes, read with protobuf.

`jax.profiler.ProfileData` shows planes, lines and events, but not the compiled modules, which XLA keeps as statistics
of the *event metadata* of the plane `/host:metadata`. So the messages are read here, by the smallest schema that names
what is needed: protobuf passes over a field that is not named, and a later version of a message may add what it likes.
Text is read as bytes, since one name that is not UTF-8 would cost the whole file.
"""

import functools
import gzip
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

from tokamax._src import errors

_PACKAGE = "tokamax_profile"

# Message -> field -> (number, type), as in OpenXLA's `xplane.proto` and `hlo.proto`; `*` stands for repeated. A map is,
# on the wire, a repeated message of key and value.
_SCHEMA: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "XSpace": {"planes": (1, "*XPlane")},
    "XPlane": {
        "name": (2, "bytes"),
        "lines": (3, "*XLine"),
        "event_metadata": (4, "*EventMetadataEntry"),
        "stat_metadata": (5, "*StatMetadataEntry"),
    },
    "EventMetadataEntry": {"key": (1, "int64"), "value": (2, "XEventMetadata")},
    "StatMetadataEntry": {"key": (1, "int64"), "value": (2, "XStatMetadata")},
    "XLine": {"name": (2, "bytes"), "timestamp_ns": (3, "int64"), "events": (4, "*XEvent")},
    "XEvent": {
        "metadata_id": (1, "int64"),
        "offset_ps": (2, "int64"),
        "duration_ps": (3, "int64"),
        "stats": (4, "*XStat"),
    },
    "XEventMetadata": {"name": (2, "bytes"), "display_name": (4, "bytes"), "stats": (5, "*XStat")},
    "XStatMetadata": {"name": (2, "bytes")},
    "XStat": {
        "metadata_id": (1, "int64"),
        "uint64_value": (3, "uint64"),
        "int64_value": (4, "int64"),
        "str_value": (5, "bytes"),
        "bytes_value": (6, "bytes"),
        "ref_value": (7, "uint64"),
    },
    "HloProto": {"hlo_module": (1, "HloModule")},
    "HloModule": {"name": (1, "bytes"), "computations": (3, "*HloComputation"), "id": (5, "int64")},
    "HloComputation": {"instructions": (2, "*HloInstruction"), "id": (5, "int64")},
    "HloInstruction": {
        "name": (1, "bytes"),
        "opcode": (2, "bytes"),
        "metadata": (7, "OpMetadata"),
        "called_computation_ids": (38, "*int64"),
    },
    "OpMetadata": {"op_name": (2, "bytes")},
}


@functools.cache
def messages() -> Mapping[str, Any]:
    """Returns the message classes by name.

    Raises:
      MissingExtraError: if protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise errors.MissingExtraError(
            "protobuf must be installed to read profiles; try: pip install 'tokamax[profile]'"
        ) from error

    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _SCHEMA:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


def _parsed(name: str, raw: bytes) -> Any:
    """Returns a message of that name, or None if the bytes are none."""
    cls = messages()[name]
    from google.protobuf.message import DecodeError

    try:
        return cls.FromString(raw)
    except DecodeError:
        return None


def hlo_module(raw: bytes) -> Any:
    """Returns the `HloModule` of a serialized `HloProto` or `HloModuleProto`, or None if the bytes are neither."""
    proto = _parsed("HloProto", raw)
    for module in (None if proto is None else proto.hlo_module, _parsed("HloModule", raw)):
        if module is not None and any(i.name and i.opcode for c in module.computations for i in c.instructions):
            return module
    return None


def read(path: pathlib.Path) -> Any:
    """Returns the `XSpace` of a file, which may be compressed with gzip.

    Raises:
      FormatError: if the file is no profile, with what it is instead, as far as that can be told.
      MissingExtraError: if protobuf is not installed.
      OSError: if the file cannot be read.
    """
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise errors.FormatError(f"{path} must be a whole gzip file, got a damaged one ({error})") from error
    if not raw:
        raise errors.FormatError(f"{path} must be a profile, got an empty file; was the profiler stopped?")
    wanted = "must be a profile, the .xplane.pb that jax.profiler.trace writes, got"
    if (head := raw[:4096].lstrip()).startswith((b"HloModule", b"module @", b"#loc")):
        raise errors.FormatError(f"{path} {wanted} the text of a program; it holds no measured times")
    if head.startswith((b"{", b"[")):
        raise errors.FormatError(f"{path} {wanted} JSON; the .xplane.pb file lies beside the trace.json.gz")
    space = _parsed("XSpace", raw)
    if space is not None and any(plane.name.startswith(b"/") for plane in space.planes):
        return space
    if hlo_module(raw) is not None:
        raise errors.FormatError(
            f"{path} {wanted} an HLO dump; profile the program, or pass the function itself to tokamax.autotune"
        )
    if space is None:
        raise errors.FormatError(f"{path} {wanted} one that is cut short or damaged, or another kind of file")
    raise errors.FormatError(f"{path} {wanted} a file without planes of a host or device")
