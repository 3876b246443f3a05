import enum
import sys

import jax
import pytest

from tokamax._src import errors, registry


@pytest.fixture(autouse=True)
def empty_tables(monkeypatch):
    for table in ("_ops", "_implementations", "_values", "_names"):
        monkeypatch.setattr(registry, table, {})


class Colour(enum.Enum):
    RED = 1


class One: ...


class Two: ...


def function(): ...


def test_ops_are_found_by_name_and_the_newest_wins():
    registry.add_op("op", One)
    assert registry.op_class("op") is One
    registry.add_op("op", Two)
    assert registry.op_class("op") is Two


def test_unknown_op_is_a_format_error_with_advice():
    with pytest.raises(errors.FormatError, match="'os.system' is not known.*import the module"):
        registry.op_class("os.system")
    with pytest.raises(errors.FormatError) as caught:
        registry.op_class("x" * 10_000)
    assert len(str(caught.value)) < 300


def test_implementations_stand_in_order_of_registration():
    assert registry.register("family", "b")(One) is One
    registry.register("family", "a")(Two)
    registry.register("other", "b")(Two)
    assert registry.implementations("family") == ("b", "a")
    assert registry.implementation("family", "b") is One
    assert registry.implementations("nobody") == ()


def test_unknown_implementation_names_those_there_are():
    registry.register("family", "b")(One)
    with pytest.raises(errors.ArgumentError, match=r"implementation of family must be one of \['b'\], got 'c'"):
        registry.implementation("family", "c")
    with pytest.raises(errors.ArgumentError, match=r"one of \[\], got 'c'"):
        registry.implementation("nobody", "c")


def test_registering_again_replaces_in_place():
    for cls in (One, Two):
        registry.register("family", "a")(cls)
        registry.register("family", "b")(One)
    assert registry.implementations("family") == ("a", "b")
    assert registry.implementation("family", "a") is Two


def test_lazy_implementation_is_imported_on_first_use(tmp_path, monkeypatch):
    (tmp_path / "tokamax_lazy_module.py").write_text("class Lazy: ...")
    monkeypatch.syspath_prepend(tmp_path)
    registry.register_lazily("family", "lazy", "tokamax_lazy_module:Lazy")
    assert registry.implementations("family") == ("lazy",)
    assert "tokamax_lazy_module" not in sys.modules
    cls = registry.implementation("family", "lazy")
    assert cls.__name__ == "Lazy" and registry.implementation("family", "lazy") is cls
    assert registry.family_of(cls) == ("family", "lazy")


def test_family_of():
    registry.register("family", "a")(One)
    registry.register_lazily("family", "b", f"{Two.__module__}:Two")
    assert registry.family_of(One) == ("family", "a")
    assert registry.family_of(Two) == ("family", "b")
    assert registry.family_of(Colour) is None


@pytest.mark.parametrize("value", [Colour, One, function], ids=lambda value: value.__name__)
def test_values_are_recalled_by_the_name_they_are_remembered_with(value):
    name = registry.remember(value)
    assert name == registry.name_of(value) == f"{__name__}.{value.__qualname__}"
    assert registry.recall(name) is value


def test_first_name_of_a_value_stays_and_all_are_understood():
    registry.remember(jax.nn.relu, "jax.nn.relu")
    registry.remember(jax.nn.relu, "relu")
    assert registry.name_of(jax.nn.relu) == "jax.nn.relu"
    assert registry.recall("relu") is registry.recall("jax.nn.relu") is jax.nn.relu


def test_nothing_is_imported_for_a_name():
    with pytest.raises(errors.FormatError, match="'os.system' is not known.*register_value"):
        registry.recall("os.system")
