"""`tokamax doctor`: the device, the versions, the caches, and which models and data apply here."""

import argparse
import dataclasses
import datetime
import os
import pathlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

from tokamax._src import devices, dispatch, options, registry
from tokamax._src.autotuning import housekeeping, store
from tokamax._src.op import NullConfig
from tokamax._src.tables import format_table
from tokamax._src.tools import common

_LIBRARIES = ("tokamax", "jax", "jaxlib", "numpy", "scikit-learn", "protobuf")


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "doctor",
        run,
        about="say what this machine and this installation have: device, versions, caches, models and data",
        example="tokamax doctor --json",
    )
    common.add_imports(parser)


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _is_writable(folder: pathlib.Path) -> bool:
    """Whether a folder can be written, or made where it does not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _cache(name: str, place: store.DirectoryStore) -> dict[str, Any]:
    found = list(housekeeping.sweeps(place))
    return {
        "name": name,
        "data": str(place.data),
        "models": str(place.models),
        "exists": place.data.exists(),
        "writable": _is_writable(place.data),
        "entries": sum(s.entries for s in found),
        "damaged_lines": sum(s.damaged for s in found),
        "interrupted_tunings": len(housekeeping.journals(place)),
    }


def _age_days(seconds: float) -> float:
    return round((datetime.datetime.now(datetime.UTC).timestamp() - seconds) / 86400, 1)


def _here(kind: str) -> list[dict[str, Any]]:
    """Returns, for each op, the data of this device and the model that dispatch asks first."""
    folder = devices.folder_name(kind)
    places = {"private": store.private(), "library": store.library()}
    swept = {
        (name, s.op): s for name, place in places.items() for s in housekeeping.sweeps(place) if s.device == folder
    }
    rows = []
    for op in sorted(registry.op_names()):
        if registry.op_class(op).config_cls is NullConfig:  # pyright: ignore[reportAttributeAccessIssue]
            continue
        here = [swept[name, store.file_stem(op)] for name in places if (name, store.file_stem(op)) in swept]
        paths = [place.model_path(kind, op) for place in places.values() if place.model_path(kind, op).exists()]
        model = next(dispatch.models(kind, op), None)
        rows.append(
            {
                "op": op,
                "shapes": sum(s.shapes for s in here),
                "winners": sum(s.winners for s in here),
                "newest": max((s.newest for s in here if s.newest), default=None),
                "model": None if model is None else model.name,
                "model_file_age_days": _age_days(paths[0].stat().st_mtime) if paths else None,
            }
        )
    return rows


def _problems(report: Mapping[str, Any]) -> list[str]:
    problems = []
    for cache in report["caches"]:
        if cache["name"] == "private" and not cache["writable"]:
            problems.append(f"{cache['data']} cannot be written: set TOKAMAX_CACHE_DIR to a folder that can")
        if cache["damaged_lines"]:
            problems.append(f"{cache['data']} has {cache['damaged_lines']} lines that cannot be read")
    if not any(item["winners"] or item["model"] for item in report["ops"]):
        kind = report["device"]["kind"]
        problems.append(f"nothing was measured for {kind}: ops run with their defaults until you tune (tokamax tune)")
    return problems


def examine() -> dict[str, Any]:
    """Returns what there is, as plain data; `problems` holds what should be looked at."""
    kind = devices.device_kind()
    caches = [_cache("private", store.private()), _cache("library", store.library())]
    report = {
        "device": {**dataclasses.asdict(devices.facts(kind)), "count": jax.device_count()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}},
        "options": {option.name: option.value for option in options.OPTIONS},
        "caches": caches,
        "ops": _here(kind),
    }
    return {**report, "problems": _problems(report)}


def _text(report: Mapping[str, Any]) -> str:
    device = report["device"]
    caches = [("cache", "data", "entries", "writable", "interrupted tunings")]
    caches += [
        (c["name"], c["data"], str(c["entries"]), "yes" if c["writable"] else "no", str(c["interrupted_tunings"]))
        for c in report["caches"]
    ]
    ops = [("op", "shapes", "winners", "newest", "model", "its file's age")]
    for o in report["ops"]:
        age = "-" if o["model_file_age_days"] is None else f"{o['model_file_age_days']:.0f} days"
        ops.append((o["op"], str(o["shapes"]), str(o["winners"]), o["newest"] or "-", o["model"] or "none", age))
    versions = ", ".join(f"{name} {version or '(absent)'}" for name, version in report["versions"].items())
    set_to = ", ".join(f"{name}={value}" for name, value in report["options"].items())
    problems = [f"problem: {text}" for text in report["problems"]] or ["no problems found"]
    return "\n".join(
        [
            f"device: {device['count']} x {device['kind']} ({device['platform']})",
            f"versions: {versions}",
            f"options: {set_to}",
            "",
            format_table(caches),
            "",
            format_table(ops),
            "",
            *problems,
        ]
    )


def run(args: argparse.Namespace) -> int:
    """Examines; returns 1 if there are problems."""
    common.import_modules(args.imports)
    report = examine()
    common.print_either(args, report, _text(report))
    return 1 if report["problems"] else 0
