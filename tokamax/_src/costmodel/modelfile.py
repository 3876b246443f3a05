"""The file of a cost model: arrays and a JSON manifest in one `.npz`, equal bytes for equal content.

Reading runs nothing from the file: no pickles, and every array is checked before it is used.
"""

import io
import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from tokamax._src import errors, serialization

_MANIFEST = "manifest"
_MAX_BYTES = 64 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(arrays: Mapping[str, np.ndarray], manifest: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a model file; they depend on the content alone."""
    text = serialization.dumps(dict(manifest)).encode()
    members = {**arrays, _MANIFEST: np.frombuffer(text, dtype=np.uint8)}
    buffer = io.BytesIO()
    # Entries are stored, not compressed: what a compressor writes differs between zlib versions.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            content = io.BytesIO()
            array = np.ascontiguousarray(members[name])
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            np.lib.format.write_array(content, little, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            info.create_system = 3
            archive.writestr(info, content.getvalue())
    return buffer.getvalue()


def unpack(file: str | os.PathLike[str] | IO[bytes]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads a model file into its arrays and its manifest.

    Raises:
      FormatError: if it is not a model file.
      OSError: if the path cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            if sum(info.file_size for info in infos) > _MAX_BYTES:
                raise errors.FormatError(f"a model file must hold at most {_MAX_BYTES >> 20} MiB")
            arrays = {info.filename.removesuffix(".npy"): _read(archive, info) for info in infos}
    except errors.FormatError:
        raise
    except OSError as error:
        if error.errno is None:
            raise errors.FormatError(f"a model file must be an .npz archive: {error}") from error
        raise
    except Exception as error:  # zip and npy readers fail in many ways on damaged bytes
        raise errors.FormatError(f"a model file must be an .npz archive: {error!r}") from error
    text = arrays.pop(_MANIFEST, None)
    if text is None or text.dtype != np.uint8 or text.ndim != 1:
        raise errors.FormatError("a model file must hold a manifest")
    manifest = serialization.loads(text.tobytes())
    if not isinstance(manifest, dict):
        raise errors.FormatError("the manifest of a model file must be a JSON object")
    return arrays, manifest


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    content = archive.read(info)
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise errors.FormatError(f"{info.filename} must be of npy version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    # A header that claims more than there is must not make us allocate it.
    if dtype.hasobject or int(np.prod(shape, dtype=object)) * dtype.itemsize != len(content) - stream.tell():
        raise errors.FormatError(f"{info.filename} must hold exactly the numbers that its header announces")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)
