"""Runs in a process of its own: compiles exported programs for TPUs that are not here.

It knows JAX and nothing of this library. Requests come as lines of JSON on standard input, answers leave as lines on
what was standard output; whatever else writes there is sent to standard error. It ends with its parent.
"""

import base64
import json
import os
import sys
import threading
import time
from typing import Any

MEMORY = ("argument", "output", "alias", "temp", "generated_code")
COSTS = ("flops", "bytes accessed", "transcendentals")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _figures(compiled: Any) -> dict[str, Any]:
    """Returns what the compiler says of a program, as far as it does."""
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    sizes = {name: getattr(memory, f"{name}_size_in_bytes", None) for name in MEMORY}
    return {
        "memory_bytes": {name: int(size) for name, size in sizes.items() if size is not None},
        "costs": {name: float(costs[name]) for name in COSTS if name in costs},
    }


def _compile(program: bytes, device: Any) -> dict[str, Any]:
    import jax
    from jax import export

    exported = export.deserialize(bytearray(program))
    place = jax.sharding.SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place) for aval in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, specs)
    lowered = jax.jit(exported.call).lower(*args, **kwargs)
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "seconds": time.monotonic() - start}
    return {**_figures(compiled), "seconds": time.monotonic() - start}


def main() -> None:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from jax.experimental import topologies

    devices: dict[str, Any] = {}
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        name = request["topology"]
        try:
            if name not in devices:
                devices[name] = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
            answer = _compile(base64.b64decode(request["program"]), devices[name])
        except Exception as error:
            answer = {"broken": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
