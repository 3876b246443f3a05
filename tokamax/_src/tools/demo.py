"""`tokamax demo`: the main job on this machine, in about two minutes.

Tunes a few hot shapes, runs a function with and without the result, saves and reloads it, learns a cost model from
what was just measured, predicts configs for shapes that were not tuned, and measures how good the predictions were.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tokamax
from tokamax._src import devices, numerics
from tokamax._src.autotuning.result import describe_config
from tokamax._src.inputs import example_inputs
from tokamax._src.tables import format_table
from tokamax._src.tools import common

Say = Callable[[str], None]


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "demo",
        command,
        about="tune a few ops on this machine, learn, predict, and check the predictions",
        example="tokamax demo",
    )
    parser.add_argument("--device", help="JAX platform to run on, such as cpu or gpu (default: JAX's own default)")


def command(args: argparse.Namespace) -> int:
    """Runs the demo and prints what it found."""
    report = run(device=args.device, progress_bar=not args.json, say=(lambda text: None) if args.json else print)
    if args.json:
        common.print_json(report)
    return 0


_F32 = jnp.float32

TRAINING_SHAPES = ((96, 128), (160, 256), (197, 128), (256, 192), (384, 256), (512, 128), (640, 192), (768, 256))
"""(sequence length, model width) of the attention shapes that the demo's own cost model learns from."""

NEW_SHAPES = ((224, 256), (320, 192), (577, 256))
"""Shapes that nobody tuned."""


def attention(length: int, heads: int, width: int) -> tokamax.BoundArguments:
    """Returns self attention of one sequence, causal, in float32."""
    x = jax.ShapeDtypeStruct((1, length, heads, width), _F32)
    return tokamax.XlaChunkedDotProductAttention().bind(x, x, x, is_causal=True)


def hot_shapes() -> list[tokamax.BoundArguments]:
    """Returns the calls that the demo tunes: one of each op, sized like a layer of a small model."""
    x = jax.ShapeDtypeStruct((1, 2048, 8, 64), _F32)
    hidden, weights = jax.ShapeDtypeStruct((512, 256), _F32), jax.ShapeDtypeStruct((256, 8192), _F32)
    labels = jax.ShapeDtypeStruct((512,), jnp.int32)
    tokens, experts = jax.ShapeDtypeStruct((1024, 256), _F32), jax.ShapeDtypeStruct((8, 256, 512), _F32)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    return [
        tokamax.XlaChunkedDotProductAttention().bind(x, x, x),
        tokamax.XlaChunkedRaggedDot().bind(tokens, experts, sizes),
        tokamax.XlaChunkedLinearSoftmaxCrossEntropyLoss().bind(hidden, labels, weights),
    ]


def _median_ms(run: Callable[[], Any], rounds: int = 5) -> float:
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def _tune(shapes: Sequence[tokamax.BoundArguments], progress_bar: bool, rounds: int = 3) -> tokamax.AutotuningResult:
    """Tunes live: entries of earlier runs are not reused, and these are not kept."""
    return tokamax.autotune(list(shapes), ignore_cache=True, keep=False, progress_bar=progress_bar, rounds=rounds)


def _inside_and_outside(ba: tokamax.BoundArguments, result: tokamax.AutotuningResult) -> dict[str, Any]:
    """Runs one jitted call outside and inside the result."""
    function, _ = ba.as_function()
    arrays = example_inputs(ba)
    jitted = jax.jit(function)
    with tokamax.config.private_cache(False), tokamax.config.cost_model("off"):
        outside = jax.block_until_ready(jitted(arrays))
        with result:
            inside = jax.block_until_ready(jitted(arrays))
            inside_ms = _median_ms(lambda: jitted(arrays))
        outside_ms = _median_ms(lambda: jitted(arrays))
    return {
        "outside_ms": outside_ms,
        "inside_ms": inside_ms,
        "same_output": numerics.compare(inside, outside) is None,
    }


def _predictions(learned: tokamax.AutotuningResult, progress_bar: bool) -> list[dict[str, Any]]:
    """Predicts configs for new shapes, then measures their whole spaces to see what the best would have been."""
    new = [attention(length, width // 32, 32) for length, width in NEW_SHAPES]
    with learned:
        choices = [ba.choose_config() for ba in new]
    truth = _tune(new, progress_bar)
    rows = []
    for ba, choice, entry in zip(new, choices, truth.entries, strict=False):
        medians = {c: ms for c in entry.outcomes if (ms := entry.median_ms(c)) is not None}
        chosen_ms, best_ms = medians.get(choice.config), min(medians.values(), default=None)
        rows.append(
            {
                "arguments": repr(ba),
                "config": describe_config(choice.config),
                "source": choice.source,
                "detail": choice.detail,
                "chosen_ms": chosen_ms,
                "default_ms": medians.get(entry.default),
                "best_ms": best_ms,
                "efficiency": best_ms / chosen_ms if chosen_ms and best_ms else None,
            }
        )
    return rows


def _shape_text(ba: tokamax.BoundArguments) -> str:
    """Returns the arrays of bound arguments alone, in short."""
    arrays = [
        str(x) for x in jax.tree.leaves(ba.abstract, is_leaf=lambda x: hasattr(x, "shape")) if hasattr(x, "shape")
    ]
    return " ".join(dict.fromkeys(arrays))


def run(*, device: str | None = None, progress_bar: bool = True, say: Say = print) -> dict[str, Any]:
    """Runs the demo.

    Args:
      device: JAX platform; None for JAX's own default.
      progress_bar: whether to show progress.
      say: receives the text, block by block.

    Returns:
      The same as plain data.
    """
    with jax.default_device(jax.devices(device)[0] if device else None):
        return _run(progress_bar, say)


def _run(progress_bar: bool, say: Say) -> dict[str, Any]:
    started = time.perf_counter()
    kind = devices.device_kind()
    say(f"tokamax demo on {kind}, jax {jax.__version__}\n\n1. Tuning one shape of each op: every config is measured.")
    hot = hot_shapes()
    result = _tune(hot, progress_bar)
    rows = [("op", "arrays", "default", "tuned", "speed-up", "configs", "config")]
    for entry in result.entries:
        best, default, speedup = entry.median_ms(entry.best), entry.median_ms(entry.default), entry.speedup
        rows.append(
            (
                entry.bound_args.op.registered_name().removeprefix("XlaChunked"),
                _shape_text(entry.bound_args),
                f"{default:.2f} ms" if default else "-",
                f"{best:.2f} ms" if best else "-",
                f"{speedup:.1f}x" if speedup else "-",
                str(len(entry.outcomes)),
                entry.error or describe_config(entry.best),
            )
        )
    say(format_table(rows))

    say("\n2. The same jitted function, outside and inside `with result:`.")
    lived = _inside_and_outside(hot[0], result)
    ratio = lived["outside_ms"] / lived["inside_ms"]
    same = "same output" if lived["same_output"] else "OUTPUT DIFFERS"
    say(f"attention: {lived['outside_ms']:.1f} ms outside, {lived['inside_ms']:.1f} ms inside: {ratio:.1f}x, {same}")

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "autotuning.json"
        result.dump(path)
        reloaded = tokamax.AutotuningResult.load(path)
        say(
            f"\n3. Saved and reloaded, {path.stat().st_size / 1024:.0f} KiB: "
            f"{'equal' if reloaded.overlay == result.overlay else 'DIFFERENT'}"
        )

    say(
        f"\n4. A cost model learned from {len(TRAINING_SHAPES)} attention shapes, asked about {len(NEW_SHAPES)} others."
    )
    training = _tune([attention(length, width // 32, 32) for length, width in TRAINING_SHAPES], progress_bar, rounds=2)
    learned = reloaded | training.fit()
    predictions = _predictions(learned, progress_bar)
    rows = [("arrays", "predicted config", "from", "runs in", "best possible", "default", "efficiency")]
    for ba, row in zip((attention(n, w // 32, 32) for n, w in NEW_SHAPES), predictions, strict=False):
        chosen, best, default = (
            f"{row[name]:.2f} ms" if row[name] else "-" for name in ("chosen_ms", "best_ms", "default_ms")
        )
        efficiency = f"{row['efficiency']:.3f}" if row["efficiency"] else "-"
        rows.append((_shape_text(ba), row["config"], row["source"], chosen, best, default, efficiency))
    say(format_table(rows))
    efficiencies = [row["efficiency"] for row in predictions if row["efficiency"]]
    mean = float(np.mean(efficiencies)) if efficiencies else None
    say(
        f"mean efficiency (best time / time of the chosen config): {mean:.3f}"
        if mean
        else "no prediction could be judged"
    )

    say("\n5. Where every config comes from, inside the result:")
    with learned:
        explanation = tokamax.explain([*hot, *(attention(n, w // 32, 32) for n, w in NEW_SHAPES)])
    say(str(explanation))
    seconds = time.perf_counter() - started
    say(f"\ndone in {seconds:.0f} s")
    return {
        "device_kind": kind,
        "jax": jax.__version__,
        "tuned": [
            {
                "arguments": repr(e.bound_args),
                "default_ms": e.median_ms(e.default),
                "tuned_ms": e.median_ms(e.best),
                "speedup": e.speedup,
                "config": describe_config(e.best),
                "configs": len(e.outcomes),
                "error": e.error,
            }
            for e in result.entries
        ],
        "inside_and_outside": lived,
        "predictions": predictions,
        "mean_efficiency": mean,
        "explain": explanation.to_dict(),
        "seconds": round(seconds, 1),
    }
