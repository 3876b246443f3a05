"""Checking configs: in what order, when it is enough, what is kept. And for real, where the compiler is installed."""

import dataclasses

import jax
import pytest

import tokamax
from tokamax._src import errors, files, tpus
from tokamax._src.aot import check as check_lib
from tokamax._src.aot.verdict import Verdict
from tokamax._src.autotuning import store
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import Config
from toy import Toy, ToyConfig, arrays


def bound(m=256, k=256, n=256, groups=2):
    lhs, rhs = jax.ShapeDtypeStruct((m, k), "bfloat16"), jax.ShapeDtypeStruct((groups, k, n), "bfloat16")
    return tokamax.PallasMosaicTpuRaggedDot.bind(lhs, rhs, jax.ShapeDtypeStruct((groups,), "int32"))


class Compilers:
    """Takes what it is told to take, at once."""

    count = 2

    def __init__(self, *verdicts):
        self.verdicts, self.asked = list(verdicts), 0

    def submit(self, program, topology):
        self.asked += 1
        return check_lib._known(self.verdicts.pop(0))


TAKEN, REFUSED, LATE = Verdict("compiles", seconds=1.5), Verdict("refused", "why"), Verdict("timeout", "long")
CONFIGS = [Config(64, 128, 128), Config(128, 128, 128), Config(128, 256, 128), Config(256, 256, 256)]


@pytest.fixture
def checker(monkeypatch):
    """Returns a function that makes a checker whose compilers say some verdicts."""
    pytest.importorskip("flatbuffers")
    monkeypatch.setattr(check_lib, "compiler_version", lambda: "compiler 1.0")

    def make(*verdicts, **options):
        made = check_lib.Checker("v5e", **options)
        made._compilers = Compilers(*verdicts)
        return made

    return make


def test_verdicts_come_in_order(checker):
    made = checker(TAKEN, REFUSED, LATE, TAKEN)
    assert list(made.verdicts(bound(), CONFIGS)) == list(zip(CONFIGS, (TAKEN, REFUSED, LATE, TAKEN), strict=True))


def test_it_ends_when_enough_compile(checker):
    made = checker(REFUSED, TAKEN, TAKEN, TAKEN)
    assert [v.kind for _, v in made.verdicts(bound(), CONFIGS, enough=2)] == ["refused", "compiles", "compiles"]
    assert made._compilers.asked == 3


def test_what_lasts_is_known_next_time(checker):
    first = checker(TAKEN, REFUSED, LATE, TAKEN)
    said = dict(first.verdicts(bound(), CONFIGS))
    again = checker(TAKEN)
    assert dict(again.verdicts(bound(), CONFIGS)) == said | {CONFIGS[2]: TAKEN}
    assert again._compilers.asked == 1
    assert len(list((store.private_dir() / "aot" / "tpu-v5-lite").glob("*.json"))) == 4
    fresh = checker(REFUSED, ignore_cache=True)
    assert dict(fresh.verdicts(bound(), CONFIGS[:1])) == {CONFIGS[0]: REFUSED}


def test_another_compiler_or_device_is_asked_anew(checker, monkeypatch):
    list(checker(TAKEN).verdicts(bound(), CONFIGS[:1]))
    other = checker(REFUSED)
    other.facts = tpus.of("v6e")
    assert dict(other.verdicts(bound(), CONFIGS[:1])) == {CONFIGS[0]: REFUSED}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some_flag")
    assert dict(checker(REFUSED).verdicts(bound(), CONFIGS[:1])) == {CONFIGS[0]: REFUSED}


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "else"}', '{"kind": "compiles", "reason": ""}'])
def test_a_damaged_fact_is_found_out_anew(checker, text):
    list(checker(TAKEN).verdicts(bound(), CONFIGS[:1]))
    (path,) = (store.private_dir() / "aot").glob("*/*.json")
    path.write_text(text)
    assert dict(checker(REFUSED).verdicts(bound(), CONFIGS[:1])) == {CONFIGS[0]: REFUSED}


def test_a_cache_that_cannot_be_written_costs_nothing_else(checker, monkeypatch):
    def refuse(path, content):
        raise errors.StorageError("full")

    monkeypatch.setattr(files, "write_atomically", refuse)
    assert dict(checker(TAKEN).verdicts(bound(), CONFIGS[:1])) == {CONFIGS[0]: TAKEN}


@dataclasses.dataclass(frozen=True)
class CannotBeTraced(Toy):
    name = "cannot_be_traced"

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        raise ValueError("no tile")


def test_what_jax_refuses_is_a_verdict(checker):
    made = checker()
    ((_, verdict),) = made.verdicts(CannotBeTraced.bind(*arrays()), [ToyConfig(1)])
    assert (verdict.kind, verdict.reason) == ("not lowered", "ValueError: no tile")
    assert made._compilers.asked == 0


@pytest.mark.parametrize("kind", ["TPU v99", "NVIDIA H200", "", None, 3])
def test_an_unknown_device_is_refused(kind):
    with pytest.raises(errors.ArgumentError, match=r"device_kind must be one of .*'TPU v6 lite' \(v6e\)"):
        tokamax.aot.check(bound(), CONFIGS, kind)


def test_a_verdict_has_a_known_kind():
    with pytest.raises(errors.ArgumentError, match="kind must be one of"):
        Verdict("fine")


def test_a_program_has_the_same_hash_wherever_it_is_made(checker):
    at = lambda config: check_lib.digest_of(check_lib.program_of(bound(), config, tpus.of("v5e")))
    one = [at(config) for config in CONFIGS]
    assert one == list(map(at, CONFIGS)) and len(set(one)) == len(CONFIGS)


def test_the_real_compiler_takes_a_config_and_refuses_one():
    pytest.importorskip("libtpu", reason="needs the extra aot-tpu")
    pytest.importorskip("flatbuffers", reason="needs the extra aot-tpu")
    small, large = Config(128, 256, 256), Config(256, 4096, 1024)
    found = tokamax.aot.check(bound(4096, 4096, 4096), [small, large], "v5e", timeout=120)
    assert found[small].compiles and found[small].memory_bytes["argument"] > 2 * 4096 * 4096
    assert found[large].kind == "resource exhausted", found[large]
    (other,) = tokamax.aot.check(bound(), [small], "TPU7x", timeout=120, max_workers=1).values()
    assert other.compiles and other.costs["flops"] > 0


def calls():
    """The ops for TPU, forward and gradients."""
    dot = bound(1000, 512, 640, 4)
    array = lambda heads: jax.ShapeDtypeStruct((1, 1000, heads, 128), "bfloat16")
    attention = tokamax.PallasMosaicTpuAttention.bind(array(8), array(2), array(2), is_causal=True)
    return dot, *dot.op.bind_vjp(dot), attention, attention.op.bind_vjp(attention)


@pytest.mark.parametrize("kind", ["v5e", "v6e", "7x"])
def test_every_default_compiles_for_real(kind):
    """`training/compile_ahead.py` does that with many shapes."""
    pytest.importorskip("libtpu", reason="needs the extra aot-tpu")
    pytest.importorskip("flatbuffers", reason="needs the extra aot-tpu")
    with tokamax.aot.Checker(kind, timeout=120) as checker, tokamax.config.cross_compile(checker.facts.kind):
        for ba in calls():
            ((_, verdict),) = checker.verdicts(ba, [ba.default_config])
            assert verdict.compiles, f"{ba!r}: {verdict}"
