import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokamax import BoundArguments
from tokamax._src import errors
from tokamax._src.bound_arguments import config_order
from toy import TOY_WITH_VJP, Toy, ToyConfig, arrays


def test_bind_on_class_and_instance():
    x, w = arrays()
    assert Toy.bind(x, w) == Toy().bind(x, w)


def test_key_ignores_keyword_order_defaults_values_and_config():
    x, w = arrays()
    keys = {
        Toy.bind(x, w).key,
        Toy.bind(x=x, w=w).key,
        Toy.bind(w=w, x=x, scale=1.0).key,
        Toy.bind(x + 1, w).key,
        Toy.bind(np.asarray(x), jax.ShapeDtypeStruct(w.shape, w.dtype)).key,
        Toy(config=ToyConfig(2)).bind(x, w).key,
        TOY_WITH_VJP.bind(x, w).key,
        Toy.bind(x, w, return_residuals=True).key,
    }
    assert len(keys) == 1


def test_key_tells_shapes_dtypes_static_arguments_and_op_fields_apart():
    x, w = arrays()
    bound = [
        Toy.bind(x, w),
        Toy.bind(x[:4], w),
        Toy.bind(x.astype(jnp.bfloat16), w),
        Toy.bind(x, w, scale=2.0),
        Toy.bind(x, w, activation=jax.nn.relu),
        Toy(flavour="other").bind(x, w),
    ]
    assert len({ba.key for ba in bound}) == len(bound)
    assert len({ba.fingerprint for ba in bound}) == len(bound)


def test_key_is_readable_text_and_equal_in_every_process():
    ba = Toy.bind(*arrays(), activation=jax.nn.relu)
    code = "from toy import *; import jax; print(Toy.bind(*arrays(), activation=jax.nn.relu).key)"
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert out.stdout.strip() == ba.key
    assert "f32[8,4]" in ba.key and "jax.nn.relu" in ba.key


def test_repr_leaves_out_what_is_default():
    x, w = arrays()
    assert repr(Toy.bind(x, w)) == "toy(x=f32[8,4], w=f32[4,6])"
    assert repr(Toy.bind(x, w, scale=2.0)) == "toy(x=f32[8,4], w=f32[4,6], scale=2.0)"


def test_json_round_trip():
    ba = Toy(flavour="other").bind(*arrays(), activation=jax.nn.relu)
    back = BoundArguments.from_json(json.loads(json.dumps(ba.to_json())))
    assert back == ba and back.op.flavour == "other"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"op": "nobody.Op"}, "not known"),
        ({"op": 3}, "must be an object"),
        ({"arguments": {"x": 1}}, "must have arguments"),
        ({"arguments": 3}, "must have"),
        ({"fields": {"unknown": 1}}, "must have fields among"),
    ],
)
def test_bad_json_is_a_format_error(change, match):
    data = Toy.bind(*arrays()).to_json() | change
    with pytest.raises(errors.FormatError, match=match):
        BoundArguments.from_json(data)


def test_a_file_cannot_pin_a_config_or_a_vjp():
    data = Toy.bind(*arrays()).to_json()
    data["fields"] |= {"config": 3, "vjp": 4}
    assert BoundArguments.from_json(data).op == Toy()


def test_wrong_arguments_name_the_op_and_its_signature():
    with pytest.raises(TypeError, match=r"toy.*'w'.*\(x, w"):
        Toy.bind(arrays()[0])
    with pytest.raises(TypeError, match="unexpected"):
        Toy.bind(*arrays(), nonsense=1)


def test_configs_are_feasible_and_in_a_fixed_order():
    x, w = arrays(m=4)
    configs = Toy.bind(x, w).autotuning_configs
    assert [c.block for c in configs] == [1, 1, 2, 2, 4, 4]
    assert Toy.bind(x, w).default_config == configs[0] == ToyConfig(1, None)


def test_config_order_takes_none_and_mixed_types():
    @dataclasses.dataclass(frozen=True)
    class Mixed:
        a: object

    values = [Mixed("b"), Mixed(10), Mixed(None), Mixed(9), Mixed(jnp.float32)]
    assert [m.a for m in sorted(values, key=config_order)][:3] == [None, 9, 10]


def test_empty_space_without_heuristic_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Empty(Toy):
        def _get_autotuning_configs(self, ba):
            return set()

    with pytest.raises(errors.UnsupportedError, match="space is empty"):
        Empty.bind(*arrays()).default_config  # noqa: B018


def test_pinned_config_is_chosen():
    choice = Toy(config=ToyConfig(4)).bind(*arrays()).choose_config()
    assert (choice.config, choice.source) == (ToyConfig(4), "pinned")


def test_as_function_applies_vmaps_again():
    x, w = arrays()
    spec = Toy.bind(*arrays()).abstract
    batched = dataclasses.replace(spec["x"], vmap=(3,))
    plain = dataclasses.replace(spec["w"], vmap=(0,))
    function, inputs = Toy.bind(batched, plain).as_function(ToyConfig(2))
    assert [i.shape for i in inputs] == [(3, 8, 4), (4, 6)]
    out = function([jnp.stack([x, x + 1, x]), w])
    np.testing.assert_allclose(out[1], Toy()(x + 1, w), rtol=1e-6)
