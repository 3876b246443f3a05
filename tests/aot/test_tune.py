"""autotune(device_kind=...): the best by estimate that compiles, as estimated entries. The compiler is made up here."""

import threading

import jax
import jax.numpy as jnp
import pytest

import tokamax
from tokamax import AutotuningResult, config
from tokamax._src import devices, errors
from tokamax._src.aot import check as check_lib
from tokamax._src.aot.verdict import Verdict
from tokamax._src.autotuning import store
from toy import TOY_WITH_VJP, Estimating, Toy, ToyConfig, arrays, by_block, entry

KIND = "TPU v5 lite"
REFUSED = {ToyConfig(8): Verdict("resource exhausted", "too much")}


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, in order; configs of `REFUSED` are."""
    seen = []

    def begin(self, ba, config):
        seen.append((ba, config))
        assert devices.device_kind() == KIND
        return check_lib._known(REFUSED.get(config, Verdict("compiles", seconds=1.0)))

    monkeypatch.setattr(check_lib, "compiler_version", lambda: "compiler 1.0")
    monkeypatch.setattr(check_lib.Checker, "_begin", begin)
    return seen


def bound(m=8, **fields):
    return Estimating(**fields).bind(*arrays(m))


def tune(*args, device_kind=KIND, **options):
    return tokamax.autotune(*args, device_kind=device_kind, progress_bar=False, **options)


def test_the_best_by_estimate_that_compiles(compiled):
    (found,) = tune(bound()).entries
    assert [c for _, c in compiled] == [ToyConfig(8), ToyConfig(8, True)]
    assert (found.device_kind, found.best, found.default) == (KIND, ToyConfig(8, True), ToyConfig(1))
    assert found.is_estimated and found.estimated_ms == {ToyConfig(8, True): 1.25}
    assert found.outcomes[ToyConfig(8)].reason == "resource exhausted: too much"
    assert found.environment["compiler"] == "compiler 1.0" and "timer" not in found.environment


def test_a_budget_asks_for_more_and_short_names_do(compiled):
    (found,) = tune(bound(), device_kind="v5e", budget=3, max_workers=1).entries
    assert list(found.estimated_ms) == [ToyConfig(8, True), ToyConfig(4), ToyConfig(4, True)]
    assert len(compiled) == 4


def test_several_ops_keep_their_order(compiled):
    sizes = (8, 16, 24, 8, 40)
    result = tune([bound(m) for m in sizes], max_workers=3)
    assert [e.bound_args.abstract["x"].shape[0] for e in result.entries] == [8, 16, 24, 40]


def test_dispatch_takes_it_on_that_device_below_measurements(compiled):
    result = AutotuningResult.loads(tune(bound()).dumps())
    with result, config.cross_compile(KIND):
        choice = bound().choose_config()
        assert (choice.source, choice.config) == ("estimate", ToyConfig(8, True)) and "compiler 1.0" in choice.detail
        with AutotuningResult((entry(bound_args=bound(), device_kind=KIND, best=ToyConfig(1)),)), result:
            assert bound().choose_config().source == "exact"
    result.save_to_cache()
    with config.cross_compile(KIND):
        assert bound().choose_config().detail.startswith("private cache: ")
    assert not list(store.private().sweeps())


def test_a_function_is_captured_for_the_device(compiled):
    shape = jax.ShapeDtypeStruct
    args = shape((512, 256), jnp.bfloat16), shape((4, 256, 128), jnp.bfloat16), shape((4,), jnp.int32)
    loss = lambda *args: tokamax.ragged_dot(*args).astype(jnp.float32).sum()
    result = tune(jax.value_and_grad(loss, (0, 1)), *args)
    names = {type(e.bound_args.op).__name__ for e in result.entries}
    assert names == {f"PallasMosaicTpuRaggedDot{suffix}" for suffix in ("", "LhsVjp", "RhsVjp")}
    assert all(e.is_estimated and e.best is not None for e in result.entries)


def test_an_op_without_an_estimate_has_its_error_beside_others(compiled):
    first, second = tune([Toy.bind(*arrays()), bound()]).entries
    assert first.best is None and "toy has no estimate for 'TPU v5 lite'" in first.error
    assert second.best is not None


def test_if_no_op_has_an_estimate_it_says_so(compiled):
    with pytest.raises(errors.UnsupportedError, match=r"none of \['toy', 'toy_vjp'\] has one.*_estimate_ms"):
        tune(jax.grad(lambda x, w: TOY_WITH_VJP(x, w).sum()), *arrays())
    assert tune([]).entries == () and not compiled


def test_if_nothing_compiles_the_entry_says_so(compiled, monkeypatch):
    monkeypatch.setattr(
        check_lib.Checker, "_begin", lambda self, ba, config: check_lib._known(Verdict("refused", "no"))
    )
    (found,) = tune(bound()).entries
    assert found.best is None and "none of 8 configs compiles; refused: no" in found.error and not found.is_estimated


@pytest.mark.parametrize("kind", ["TPU v99", "NVIDIA H200", 3])
def test_unknown_devices_are_refused(kind):
    with pytest.raises(errors.ArgumentError, match="device_kind must be one of"):
        tune(bound(), device_kind=kind)


@pytest.mark.parametrize(
    "options",
    [{"search": "model"}, {"rounds": 3}, {"timer": by_block}, {"isolation": "process"}, {"all_implementations": True}],
)
def test_options_of_measuring_are_refused(options):
    with pytest.raises(errors.ArgumentError, match=f"about measuring.*{next(iter(options))}"):
        tune(bound(), **options)
    with pytest.raises(errors.ArgumentError, match="budget must be at least 1"):
        tune(bound(), budget=0)


def test_it_ends_when_the_time_is_over(compiled, monkeypatch):
    released = threading.Event()
    begin = check_lib.Checker._begin

    def slow(self, ba, config):
        released.wait(10)
        return begin(self, ba, config)

    monkeypatch.setattr(check_lib.Checker, "_begin", slow)
    threading.Timer(1.0, released.set).start()
    with pytest.warns(UserWarning, match="total_timeout of 0.2 s is over: 1 of 3"):
        result = tune([bound(m) for m in (8, 16, 24)], total_timeout=0.2, max_workers=1)
    assert len(result) == 1


def test_ctrl_c_returns_what_there_is(compiled, monkeypatch):
    begin = check_lib.Checker._begin

    def interrupt(self, ba, config):
        if ba.abstract["x"].shape[0] == 16:
            raise KeyboardInterrupt
        return begin(self, ba, config)

    monkeypatch.setattr(check_lib.Checker, "_begin", interrupt)
    assert len(tune([bound(m) for m in (8, 16)], max_workers=1)) == 1
