"""Do configs compile for a TPU that is not here? Its real compiler says so, without running anything.

A config is lowered here and compiled elsewhere, see `processes`. What the compiler says is kept in the private cache,
`aot/<device>/<hash>.json`, by the lowered program, the device kind and the versions of the compiler: JAX's own cache of
compiled programs does not serve devices that are not here.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

import jax
import jaxlib
from jax import export

from tokamax._src import devices, errors, exporting, files, options, serialization, tpus
from tokamax._src.aot.processes import Compilers, compiler_version
from tokamax._src.aot.verdict import Verdict
from tokamax._src.autotuning import store
from tokamax._src.bound_arguments import BoundArguments

TIMEOUT_S = 60.0
_LOCATION = re.compile(r" loc\([^)]*\)")


def facts_of(device_kind: str) -> tpus.TpuFacts:
    """Returns the facts of a kind of TPU, named as JAX does or shortly, as `v6e`.

    Raises:
      ArgumentError: if no such kind is known.
    """
    facts = tpus.of(device_kind) if isinstance(device_kind, str) else None
    if facts is None:
        names = [f"{kind!r} ({facts.name})" for kind, facts in tpus.TPUS.items()]
        raise errors.ArgumentError(f"device_kind must be one of {', '.join(names)}, got {device_kind!r}")
    return facts


def program_of(ba: BoundArguments, config: Any, facts: tpus.TpuFacts) -> export.Exported:
    """Lowers a config for a kind of TPU."""
    with options.cross_compile(facts.kind):
        function, arrays = ba.as_function(config)
        specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        checks = exporting.DISABLE_JAX_EXPORT_CHECKS
        return export.export(jax.jit(function), platforms=["tpu"], disabled_checks=checks)(specs)


def digest_of(program: export.Exported) -> str:
    """Returns a hash of a program that is the same in every process: without the places in files that it names."""
    lines = (line for line in program.mlir_module().splitlines() if not line.startswith("#loc"))
    return hashlib.sha256("\n".join(_LOCATION.sub("", line) for line in lines).encode()).hexdigest()


class Checker:
    """Checks configs with a few compiler processes. A context manager, which ends them.

    Args:
      device_kind: the kind of TPU, as JAX names it or shortly, as `v6e`.
      timeout: limit in seconds for compiling one config.
      max_workers: configs compiled at the same time; None for one per core.
      ignore_cache: whether to compile again what the cache knows.

    Raises:
      ArgumentError: if no such kind is known.
      MissingExtraError: if the compiler is not installed.
    """

    def __init__(
        self,
        device_kind: str,
        *,
        timeout: float = TIMEOUT_S,
        max_workers: int | None = None,
        ignore_cache: bool = False,
    ):
        self.facts = facts_of(device_kind)
        self.compiler = compiler_version()
        self._compilers = Compilers(timeout, max_workers)
        self._ignore_cache = ignore_cache

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the compilers; what waits for one is told that it crashed."""
        self._compilers.close()

    @property
    def workers(self) -> int:
        """How many configs compile at the same time."""
        return self._compilers.count

    def verdicts(
        self, ba: BoundArguments, configs: Iterable[Any], enough: int | None = None
    ) -> Iterator[tuple[Any, Verdict]]:
        """Yields configs with what the compiler says of them, in the order given.

        Args:
          ba: the bound arguments.
          configs: the configs.
          enough: how many that compile are enough: then the rest is left. None for all of them.
        """
        waiting: list[tuple[Any, futures.Future[Verdict]]] = []
        remaining, taken = iter(configs), 0
        while True:
            wanted = self._compilers.count if enough is None else min(self._compilers.count, enough - taken)
            while len(waiting) < wanted and (config := next(remaining, _END)) is not _END:
                waiting.append((config, self._begin(ba, config)))
            if not waiting or wanted <= 0:
                return
            config, future = waiting.pop(0)
            verdict = future.result()
            taken += verdict.compiles
            yield config, verdict

    def _begin(self, ba: BoundArguments, config: Any) -> "futures.Future[Verdict]":
        try:
            program = program_of(ba, config, self.facts)
        except Exception as error:
            return _known(Verdict.not_lowered(error))
        path = self._path(program)
        if not self._ignore_cache and (verdict := _read(path)) is not None:
            return _known(verdict)
        future = self._compilers.submit(bytes(program.serialize()), self.facts.topology)
        future.add_done_callback(lambda done: _write(path, done))
        return future

    def _path(self, program: export.Exported) -> pathlib.Path:
        versions = [self.compiler, jaxlib.__version__, os.environ.get("LIBTPU_INIT_ARGS", "")]
        about = [digest_of(program), self.facts.kind, self.facts.topology, *versions]
        folder = store.private_dir() / "aot" / devices.folder_name(self.facts.kind)
        return folder / f"{serialization.digest(about)}.json"


_END = object()


def _known(verdict: Verdict) -> "futures.Future[Verdict]":
    future: futures.Future[Verdict] = futures.Future()
    future.set_result(verdict)
    return future


def _read(path: pathlib.Path) -> Verdict | None:
    """Returns what the cache knows; a file that is damaged is as good as none, and is written anew."""
    try:
        return Verdict.from_json(serialization.loads(path.read_bytes()))
    except (OSError, errors.FormatError):
        return None


def _write(path: pathlib.Path, done: "futures.Future[Verdict]") -> None:
    if done.cancelled() or done.exception() is not None or not done.result().is_lasting:
        return
    try:
        files.write_atomically(path, serialization.dumps(dataclasses.asdict(done.result())).encode())
    except errors.StorageError:  # It is compiled again next time.
        pass


def check(
    bound_args: BoundArguments,
    configs: Iterable[Any],
    device_kind: str,
    *,
    timeout: float = TIMEOUT_S,
    max_workers: int | None = None,
    ignore_cache: bool = False,
) -> dict[Any, Verdict]:
    """Compiles configs of an op for a TPU that is not here, with its real compiler; nothing runs.

    Args:
      bound_args: the op and its arguments.
      configs: the configs, such as `[bound_args.default_config]`.
      device_kind: the kind of TPU, as JAX names it (`TPU v6 lite`) or shortly (`v6e`).
      timeout: limit in seconds for compiling one config, in a process that is killed then.
      max_workers: configs compiled at the same time; None for one per core.
      ignore_cache: whether to compile again what the private cache knows.

    Returns:
      config -> `Verdict`.

    Raises:
      ArgumentError: if no such kind is known.
      MissingExtraError: if the compiler (libtpu) is not installed.
    """
    with Checker(device_kind, timeout=timeout, max_workers=max_workers, ignore_cache=ignore_cache) as checker:
        return dict(checker.verdicts(bound_args, configs))
