"""Named exceptions: every error that tokamax raises on purpose."""


class TokamaxError(Exception):
    """Base class of every error that tokamax raises on purpose."""


class ArgumentError(TokamaxError, ValueError):
    """An argument does not fit; the message says what must hold and what came."""


class UnsupportedError(TokamaxError, NotImplementedError):
    """An implementation cannot run these arguments, or cannot run on this device."""


class FormatError(TokamaxError, ValueError):
    """A file or text is not what it must be, so nothing of it is used."""


class SerializationError(TokamaxError, TypeError):
    """A value cannot be written to a file, for example a lambda."""


class CacheMissError(TokamaxError, LookupError):
    """No measured config is known, and the options forbid to go on without one."""


class StorageError(TokamaxError, OSError):
    """A cache folder or file cannot be read or written."""


class MissingExtraError(TokamaxError, ImportError):
    """An optional library is not installed; the message names the extra to install."""
