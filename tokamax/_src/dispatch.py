"""Which config runs: the ladder from a pinned config down to the op's own heuristic.

Rungs, the first that answers wins: pinned (answered by `BoundArguments`), exact, model, tuned, estimate, heuristic.
Everything a choice depends on (active results, caches, options) is in JAX's cache key, see `options`; choices are
remembered per call signature and that state, so a repeated call costs a dictionary look-up.
"""

import dataclasses
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from tokamax._src import bound_arguments, devices, environment, errors, estimates, options, serialization
from tokamax._src.autotuning import store as store_lib
from tokamax._src.autotuning.estimated import Estimated
from tokamax._src.autotuning.result import AutotuningResult, Winner, describe_config
from tokamax._src.bound_arguments import BoundArguments, ConfigChoice
from tokamax._src.costmodel import features
from tokamax._src.costmodel.model import CostModel, Prediction
from tokamax._src.op import NullConfig

_log = logging.getLogger("tokamax")
_MEMO_LIMIT = 100_000

_memo: dict[Any, ConfigChoice] = {}
_logged: set[tuple[str, str]] = set()
_failed: set[tuple[str, str, Any]] = set()
"""(device kind, key, config) of choices that could not be traced: not tried again in this process."""
_warned: set[tuple[Any, ...]] = set()
"""What was warned of in this process, so that it is not again."""
_epochs = threading.Lock()
session_store = store_lib.MemoryStore()
"""Winners of the tunings that dispatch itself asked for."""

HOW_TO_TUNE = "tokamax.autotune(f, *args)"


def warn(text: str) -> None:
    """Warns the caller of the library."""
    warnings.warn(text, stacklevel=2)


def _warn_once(what: tuple[Any, ...], text: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a winner or model was found, in words."""

    name: str
    found: Any


def _winners(kind: str, op: str, key: str) -> Iterator[Place]:
    """Yields measured winners of a key, the one to prefer first."""
    for depth, overlay in enumerate(reversed(options.overlays.value)):
        if (winner := overlay.winners.get((kind, key))) is not None:
            yield Place("the active result" if depth == 0 else f"active result {depth} levels out", winner)
    if (winner := session_store.winner(kind, op, key)) is not None:
        yield Place("tuned in this process", winner)
    for name, store in store_lib.in_use():
        if (winner := store.winner(kind, op, key)) is not None:
            yield Place(f"{name} cache", winner)


def _estimated_configs(kind: str, op: str, key: str) -> Iterator[Place]:
    """Yields what tunings without the device found for a key, the one to prefer first."""
    for overlay in reversed(options.overlays.value):
        if (found := overlay.estimated.get((kind, key))) is not None:
            yield Place("the active result", found)
    for name, store in store_lib.in_use():
        if (found := store.estimated(kind, op, key)) is not None:
            yield Place(f"{name} cache", found)


def models(kind: str, op: str) -> Iterator[Place]:
    """Yields cost models for an op, the one to prefer first; those of other devices of its sort, flagged, last."""
    for overlay in reversed(options.overlays.value):
        if (model := overlay.models.get((kind, op))) is not None:
            yield Place("the active result", model)
    stores = store_lib.in_use()
    for name, store in stores:
        if (model := store.model(kind, op)) is not None:
            yield Place(f"{name} model", model)
    here = devices.facts(kind)
    for name, store in stores:
        others = [store.model(k, op) for k in store.model_kinds(op) if k != devices.folder_name(kind)]
        of_its_sort = [m for m in others if m is not None and m.facts_.platform == here.platform]
        for model in sorted(of_its_sort, key=lambda m: (devices.unlikeness(here, m.facts_), m.device_kind_)):
            yield Place(f"{name} model of another device, {model.device_kind_}", model)


def model(kind: str, op: str) -> CostModel | None:
    """Returns the cost model that dispatch asks first for an op, if there is one."""
    return next((place.found for place in models(kind, op)), None)


def _decoded(ba: BoundArguments, place: Place) -> Any:
    """Returns the config of what was found, or None with a warning if it does not fit this op or these arguments."""
    winner: Winner | Estimated = place.found
    kind = devices.device_kind()
    try:
        config = serialization.build_dataclass(ba.op.config_cls, dict(winner.config))
        if (kind, ba.key, config) in _failed:
            return None
        if ba.op._is_feasible(ba, config):
            return config
        reason = f"{describe_config(config)} is not feasible for these arguments"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    _warn_once(("winner", place.name, kind, ba.key), f"{place.name}: the config of {ba!r} is not used: {reason}")
    return None


def _exact(ba: BoundArguments, kind: str) -> tuple[ConfigChoice | None, str]:
    """Returns the choice by a measurement, and a remark on those that are not fresh enough to be used."""
    stale, remark = None, ""
    for place in _winners(kind, ba.op.registered_name(), ba.key):
        changed = environment.stale_parts(place.found.environment)
        fresh = environment.is_fresh(place.found.environment)
        if not fresh and options.freshness.value == "strict":
            remark = remark or f"; {place.name} is not used: freshness is strict, and {'; '.join(changed)}"
            continue
        if (stale is not None and not fresh) or (config := _decoded(ba, place)) is None:
            continue
        detail = place.name + (f", measured with {'; '.join(changed)}" if changed else "")
        choice = ConfigChoice(config, "exact", detail, 1.0, environment=place.found.environment)
        if fresh:
            return choice, ""
        stale = choice
    return stale, remark


def measured_ms(ba: BoundArguments) -> float | None:
    """Returns the median time of the winner that `choose` would take for bound arguments; None where none was measured.

    Winners that are not fresh do not count: times of two toolchains say nothing of each other.
    """
    kind = devices.device_kind()
    for place in _winners(kind, ba.op.registered_name(), ba.key):
        if environment.is_fresh(place.found.environment) and _decoded(ba, place) is not None:
            return place.found.median_ms
    return None


def unlisted(ba: BoundArguments) -> str | None:
    """Returns why the space of bound arguments cannot be listed, with one warning per op; None if it can be."""
    try:
        _ = ba.autotuning_configs
    except Exception as error:
        name, reason = ba.op.registered_name(), f"{type(error).__name__}: {error}"
        _warn_once(
            ("space", name),
            f"the configs of {name} cannot be listed for {ba!r}: {reason}; no cost model chooses among them",
        )
        return f"its configs cannot be listed: {reason}"
    return None


def predictions(ba: BoundArguments) -> Iterator[tuple[str, Prediction]]:
    """Yields what each cost model says about the space of bound arguments on this device, the preferred model first.

    Indices refer to `ba.autotuning_configs`.
    """
    if unlisted(ba) is not None or len(ba.autotuning_configs) < 2:
        return
    kind, op, configs = devices.device_kind(), ba.op.registered_name(), ba.autotuning_configs
    extra = features.of_op(ba, configs)
    for place in models(kind, op):
        model: CostModel = place.found
        try:
            found = model.choose(ba.abstract, configs, devices.facts(kind), default=ba.default_config, extra=extra)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _warn_once(("model", place.name, kind, op), f"{place.name}: not used for {ba!r}, since it raises {reason}")
        else:
            yield place.name, found


@dataclasses.dataclass(frozen=True)
class _Abstained:
    """Why no model gave a choice, and the nearest shape of the first that was asked."""

    reason: str
    nearest: str | None = None


def _predicted(ba: BoundArguments) -> ConfigChoice | _Abstained:
    """Returns the choice of the first model that stands by one, or why the first of them does not.

    Where none does, the config that beat the default on all of the nearest measured shapes of a model is the choice.
    """
    if options.cost_model.value == "off":
        return _Abstained("cost models are off")
    if (reason := unlisted(ba)) is not None:
        return _Abstained(reason)
    abstained, fallback = None, None
    for name, prediction in predictions(ba):
        if prediction.abstain is None:
            detail = f"{name}, nearest measured shape {prediction.nearest}" if prediction.nearest else name
            config, spread = ba.autotuning_configs[prediction.index], float(prediction.spread[prediction.index])
            return ConfigChoice(config, "model", detail, prediction.expected_slowdown, spread, prediction.nearest)
        abstained = abstained or _Abstained(f"{name}: {prediction.abstain}", prediction.nearest)
        if fallback is None and prediction.fallback is not None:
            detail = f"{name}, what beat the default on the nearest measured shapes ({prediction.abstain})"
            config = ba.autotuning_configs[prediction.fallback]
            fallback = ConfigChoice(config, "model", detail, nearest=prediction.nearest)
    return fallback or abstained or _Abstained("no model of this op and device")


def _tuned(ba: BoundArguments) -> ConfigChoice | None:
    """Tunes now, in a thread of its own: the caller may be in the middle of a JAX trace."""
    results: list[AutotuningResult] = []

    def tune() -> None:
        try:
            results.append(bound_arguments.get_runtime().autotune(ba))
        except Exception as error:
            warn(f"{ba!r} could not be tuned at its call: {type(error).__name__}: {error}")

    thread = threading.Thread(target=tune)
    thread.start()
    thread.join()
    entry = results[0].entries[0] if results and results[0].entries else None
    if entry is None or entry.best is None:
        return None
    session_store.put([entry])
    return ConfigChoice(entry.best, "tuned", "tuned at this call", 1.0, environment=entry.environment)


def _estimated_before(ba: BoundArguments, kind: str) -> ConfigChoice | None:
    """Returns the choice by an estimated entry; by one of other versions only where there is no other.

    What a compiler of other versions took must be safe besides: this one may draw the limits elsewhere.
    """
    stale = None
    for place in _estimated_configs(kind, ba.op.registered_name(), ba.key):
        found: Estimated = place.found
        changed = environment.stale_parts(found.environment, environment.COMPILED)
        fresh = not changed or options.freshness.value == "any"
        if not fresh and (stale is not None or options.freshness.value == "strict"):
            continue
        if (config := _decoded(ba, place)) is None or (changed and not ba.op._is_safe(ba, config)):
            continue
        compiler = found.environment.get("compiler", "no compiler")
        detail = f"{place.name}: {_estimated_ms(found.ms)}, taken by {compiler}"
        choice = ConfigChoice(config, "estimate", detail + (f" with {'; '.join(changed)}" if changed else ""))
        if fresh:
            return choice
        stale = choice
    return stale


def _estimated(ba: BoundArguments, kind: str) -> ConfigChoice | None:
    """Returns the choice by an estimate, made before or now; None where the op has none for this device."""
    try:
        if (choice := _estimated_before(ba, kind)) is not None:
            return choice
        ranked = estimates.ranked(ba, kind, safe=True)
    except Exception as error:  # The default may do without what raises here.
        warn(f"{ba!r} does without an estimate, since its space or rules raised {type(error).__name__}: {error}")
        return None
    for config, ms in ranked:
        if (kind, ba.key, config) not in _failed:
            return ConfigChoice(config, "estimate", f"the least of {len(ranked)}: {_estimated_ms(ms)}")
    return None


def _estimated_ms(ms: float) -> str:
    return f"estimated at {ms:.3g} ms, not measured"


def _choose(ba: BoundArguments, kind: str) -> ConfigChoice:
    if ba.op.config_cls is NullConfig:
        return ConfigChoice(ba.default_config, "heuristic", "nothing to tune", 1.0)
    choice, remark = _exact(ba, kind)
    return _without_exact(ba, kind, remark) if choice is None else choice


def _without_exact(ba: BoundArguments, kind: str, remark: str) -> ConfigChoice:
    """Goes on down the ladder; `remark` says which measurements are there and not used."""
    fallback = options.autotuning_cache_miss_fallback.value
    if options.replay.value or fallback == "error":
        raise errors.CacheMissError(
            f"a measured config must exist for {ba!r} on {kind}, since tokamax.config."
            f"{'replay is on' if options.replay.value else 'autotuning_cache_miss_fallback is error'}; measure it with "
            f"{HOW_TO_TUNE} and enter the result, or save it with result.save_to_cache(){remark}"
        )
    choice = _predicted(ba)
    if isinstance(choice, ConfigChoice):
        if (kind, ba.key, choice.config) not in _failed:
            return dataclasses.replace(choice, detail=choice.detail + remark)
        choice = _Abstained("its choice could not be traced", choice.nearest)
    abstained = choice
    if options.cost_model.value == "required":
        raise errors.CacheMissError(
            f"a cost model must stand by a config for {ba!r} on {kind}, since tokamax.config.cost_model is required; "
            f"{abstained.reason}; measure the shape with {HOW_TO_TUNE}"
        )
    if fallback == "autotune" and (choice := _tuned(ba)) is not None and (kind, ba.key, choice.config) not in _failed:
        return choice
    if (choice := _estimated(ba, kind)) is not None:
        return dataclasses.replace(choice, detail=choice.detail + remark, nearest=abstained.nearest)
    detail = f"the op's default ({abstained.reason}){remark}"
    return ConfigChoice(ba.default_config, "heuristic", detail, nearest=abstained.nearest)


def _log_once(ba: BoundArguments, kind: str, choice: ConfigChoice) -> None:
    place = kind, ba.key
    if place in _logged or ba.op.config_cls is NullConfig:
        return
    _logged.add(place)
    hint = "" if choice.source in ("exact", "tuned") else f"; tune with {HOW_TO_TUNE}"
    _log.info("%r on %s: %s (%s: %s)%s", ba, kind, describe_config(choice.config), choice.source, choice.detail, hint)


def choose(ba: BoundArguments) -> ConfigChoice:
    """Returns the config to run bound arguments with on the current device; see the module's text.

    Raises:
      CacheMissError: if no config is known and the options forbid to go on without one.
    """
    kind = devices.device_kind()
    memo_key = (ba.fingerprint, kind, options.state(), store_lib.private_dir())
    choice = _memo.get(memo_key)
    if choice is None:
        choice = _choose(ba, kind)
        _log_once(ba, kind, choice)
        if choice.source != "tuned":
            if len(_memo) >= _MEMO_LIMIT:
                _memo.clear()
            _memo[memo_key] = choice
    return choice


def choose_without(ba: BoundArguments, choice: ConfigChoice, error: Exception) -> ConfigChoice:
    """Returns what to run in place of a choice that could not be traced; it is not chosen again in this process."""
    kind = devices.device_kind()
    if (kind, ba.key, choice.config) in _failed:  # It came back: nothing else is left to fall to.
        raise error
    _failed.add((kind, ba.key, choice.config))
    _memo.clear()
    found = choose(ba)
    warn(
        f"{describe_config(choice.config)} ({choice.source}: {choice.detail}) failed for {ba!r} with "
        f"{type(error).__name__}: {str(error)[:200]}; {describe_config(found.config)} ({found.source}) is used instead"
    )
    return found


def forget() -> None:
    """Drops remembered choices after the caches changed, and makes JAX trace again what was traced with them."""
    _memo.clear()
    _failed.clear()
    _warned.clear()
    store_lib.private().reload()
    with _epochs:
        options.cache_epoch.set_global(options.cache_epoch.get_global() + 1)
