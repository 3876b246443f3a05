"""Where the files that come with the library lie: measured sweeps and cost models.

A wheel holds them inside the package, as `tokamax/data` and `tokamax/models`. In a checkout, and so in an editable
install, they lie beside the package, where they are made.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def data_dir() -> Path:
    """Returns the folder of measured sweeps and their winners, `<device>/<op>.jsonl` and `<op>.best.json`."""
    return _folder("data")


def models_dir() -> Path:
    """Returns the folder of trained cost models, `<device>/<op>.npz`."""
    return _folder("models")
