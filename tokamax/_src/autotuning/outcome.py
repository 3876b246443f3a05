"""Outcomes of configs, and the rule that decides between them."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from tokamax._src import errors
from tokamax._src.benchmarking import BenchmarkData
from tokamax._src.bound_arguments import config_order

STAGES = ("config", "compile", "check", "run", "timeout")
PHASES = {"trace": "tracing", "compile": "compiling", "check": "the check", "run": "a run"}
"""What a limit holds for, each on its own, in words."""
MIN_GAIN = 0.02


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a config does not count.

    Attributes:
      stage: `config` (refused before compiling), `compile`, `check` (a wrong output, see `gate`), `run`, `timeout`.
      reason: one line.
      measured_ms: samples in ms that were taken all the same: before it failed, or of a config with wrong outputs.
    """

    stage: str
    reason: str
    measured_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise errors.ArgumentError(f"stage must be one of {STAGES}, got {self.stage!r}")
        measured = BenchmarkData(self.measured_ms).samples_ms if self.measured_ms else ()
        object.__setattr__(self, "measured_ms", measured)

    @classmethod
    def of(cls, stage: str, error: BaseException) -> "Failure":
        """Returns the failure that an exception carries, else its type and the first line of its message."""
        if isinstance(carried := getattr(error, "failure", None), Failure):
            return carried
        lines = str(error).strip().splitlines()
        return cls(stage, f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}")


class ConfigFailed(Exception):
    """Carries the failure of a config to where it is recorded."""

    def __init__(self, failure: Failure):
        super().__init__(failure.reason)
        self.failure = failure


def over_limit(phase: str, limit_s: float, remark: str = "") -> Failure:
    """Returns the failure of a config that exceeded the limit of a phase."""
    return Failure("timeout", f"{PHASES[phase]} took more than {limit_s:g} s{remark}")


Outcome = BenchmarkData | Failure


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as plain JSON data."""
    if isinstance(outcome, Failure):
        measured = {"measured_ms": list(outcome.measured_ms)} if outcome.measured_ms else {}
        return {"failure": outcome.stage, "reason": outcome.reason, **measured}
    return {**dataclasses.asdict(outcome), "samples_ms": list(outcome.samples_ms)}


def from_json(data: Any) -> Outcome:
    """Reads what `to_json` wrote.

    Raises:
      FormatError: if it is not that.
    """
    try:
        if "failure" in data:
            if not isinstance(data["failure"], str):
                raise TypeError("stage must be text")
            measured = tuple(float(s) for s in data.get("measured_ms", ()))
            return Failure(data["failure"], str(data.get("reason", "")), measured)
        memory = data.get("peak_memory_bytes")
        return BenchmarkData(
            tuple(float(s) for s in data["samples_ms"]),
            float(data.get("compile_ms", 0.0)),
            float(data.get("lowering_ms", 0.0)),
            None if memory is None else int(memory),
        )
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise errors.FormatError(f"an outcome must hold samples_ms or a failure, got {str(data)[:80]}") from error


def paired_gain(default: BenchmarkData, other: BenchmarkData) -> tuple[float, float]:
    """Compares two configs that were measured in the same rounds.

    The gain is the median over rounds of log(default / other); rounds are paired from the first, so that what slows
    the machine for a while slows both. Its noise is twice the standard error of that median, estimated from the
    median absolute deviation as 1.4826 * MAD * sqrt(pi / 2) / sqrt(rounds) (the normal-consistent MAD and the
    asymptotic efficiency of the median; Huber, Robust Statistics, 1981, ch. 1 and 5).

    Returns:
      Gain and noise, both as natural logarithms of a ratio. With a single round the noise is 0.
    """
    pairs = zip(default.samples_ms, other.samples_ms, strict=False)
    logs = [math.log(max(d, 1e-9) / max(o, 1e-9)) for d, o in pairs]
    gain = statistics.median(logs)
    deviation = statistics.median(abs(x - gain) for x in logs)
    return gain, 2 * 1.4826 * deviation * math.sqrt(math.pi / 2) / math.sqrt(len(logs))


def fastest(outcomes: Mapping[Any, Outcome], default: Any, *, min_gain: float = MIN_GAIN) -> Any:
    """Decides which config to use.

    The candidate is the config with the least median time, ties in the fixed order of configs. It replaces the
    default only if its paired gain over the default exceeds both `min_gain` and the noise of that gain
    (`paired_gain`); otherwise the default stays. Where the default was not measured, the candidate is used.
    The order of `outcomes` does not matter.

    Args:
      outcomes: config -> measurement or failure.
      default: the default config.
      min_gain: the least gain that counts, as a share of the default's time.

    Returns:
      The config, or None if nothing ran.
    """
    measured = {config: o for config, o in outcomes.items() if isinstance(o, BenchmarkData)}
    if not measured:
        return None
    best = min(measured, key=lambda config: (measured[config].median_ms, config_order(config)))
    if default not in measured or best == default:
        return best
    gain, noise = paired_gain(measured[default], measured[best])
    return best if gain > max(-math.log1p(-min_gain), noise) else default
