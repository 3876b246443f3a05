import datetime
import json
from importlib import metadata

import jax
import jaxlib
import pytest

from tokamax import config
from tokamax._src import devices, environment


def test_describe_says_what_a_reader_must_know():
    about = environment.describe(timer="table", rounds=3)
    assert (about["jax"], about["jaxlib"]) == (jax.__version__, jaxlib.__version__)
    assert about["backend"] == devices.current().client.platform_version
    assert about["cores"] == devices.facts().cores
    assert (about["timer"], about["rounds"]) == ("table", 3)
    assert {"tokamax", "python", "system", "memory_bytes"} <= set(about)
    assert json.loads(json.dumps(about, allow_nan=False)) == about


def test_time_is_utc():
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    time = datetime.datetime.fromisoformat(environment.describe()["time"])
    assert time.utcoffset() == datetime.timedelta(0)
    assert before <= time <= datetime.datetime.now(datetime.UTC)


def test_toolchain_is_part_of_the_description():
    assert tuple(environment.toolchain()) == environment.TOOLCHAIN
    assert environment.toolchain().items() <= environment.describe().items()


def test_fresh_environment_has_no_stale_parts():
    assert environment.stale_parts(environment.describe()) == []
    assert environment.stale_parts(environment.describe() | {"python": "2.7", "cores": 1}) == []


@pytest.mark.parametrize("part", environment.TOOLCHAIN)
def test_stale_part_says_then_and_now(part):
    now = environment.toolchain()[part][:40]
    assert environment.stale_parts(environment.describe() | {part: "0.0.1"}) == [f"{part} 0.0.1 (now {now})"]


@pytest.mark.parametrize("part", ["tokamax", "system", "cores"])
def test_strict_freshness_compares_more_and_any_nothing(part):
    other = environment.describe() | {part: 0}
    assert environment.is_fresh(other)
    with config.freshness("strict"):
        assert environment.stale_parts(other)[0].startswith(f"{part} 0 (now ") and not environment.is_fresh(other)
        assert environment.is_fresh(environment.describe())
    with config.freshness("any"):
        assert environment.is_fresh({}) and len(environment.stale_parts({})) == len(environment.TOOLCHAIN)


def test_records_without_a_toolchain_are_stale():
    assert [text.split()[:2] for text in environment.stale_parts({})] == [[p, "unknown"] for p in environment.TOOLCHAIN]
    assert len(environment.stale_parts({"jax": 3, "jaxlib": ["x" * 10_000], "backend": None})) == 3
    assert all(len(text) < 120 for text in environment.stale_parts({"jaxlib": ["x" * 10_000]}))


def test_a_package_that_is_not_installed_has_an_unknown_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert environment._fixed.__wrapped__()["tokamax"] == "unknown"
