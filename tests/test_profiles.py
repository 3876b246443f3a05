import gzip
import json
import sys

import jax
import jax.numpy as jnp
import pytest

import tokamax
from tokamax._src import errors, profiles, xspace
from tokamax._src.bound_arguments import SCOPE_PREFIX, Usage
from tokamax.autotuning import bound_args_from_profile, get_bound_args
from toy import TOY_WITH_VJP, Toy, arrays

RUNS = 3


def record(folder, f, *args, runs=RUNS):
    """Profiles some runs of a function that is compiled already."""
    jax.block_until_ready(f(*args))
    with jax.profiler.trace(folder):
        for _ in range(runs):
            jax.block_until_ready(f(*args))
    return folder


def several(x, w):
    a = Toy(flavour="a")(x, w)
    return a + Toy(flavour="b")(x, w, scale=2.0) + Toy(flavour="a")(x + 1, w)


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (c + TOY_WITH_VJP(x + c, w).sum(), None), 0.0, None, length=4)[0]


def remat(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(TOY_WITH_VJP(jnp.sin(x), w)))(x).sum()


def nested(x, w):
    return jax.jit(lambda x: jax.jit(lambda x: Toy(flavour="inner")(x, w))(x) * 2)(x)


def block(x, w):
    """Attention and a loss, in a loop with remat, as in a language model."""

    def body(c, _):
        q = (c @ w).reshape(2, 16, 2, 8)
        return c + tokamax.dot_product_attention(q, q, q, is_causal=True).reshape(2, 16, 16), None

    y, _ = jax.lax.scan(jax.checkpoint(body), x.reshape(2, 16, 16), None, length=2)
    loss = tokamax.linear_softmax_cross_entropy_loss
    return loss(y.reshape(32, 16), jnp.zeros(32, jnp.int32), jnp.ones((16, 24)))


PROGRAMS = {
    "jit": (several, arrays()),
    "grad": (jax.value_and_grad(lambda x, w: (TOY_WITH_VJP(x, w) ** 2).sum()), arrays()),
    "scan": (scanned, arrays()),
    "grad of scan": (jax.value_and_grad(scanned), arrays()),
    "vmap": (jax.vmap(several, (0, None)), (jnp.ones((5, 8, 4)), arrays()[1])),
    "grad of vmap": (
        jax.value_and_grad(lambda x, w: (jax.vmap(TOY_WITH_VJP, (0, None))(x, w) ** 2).sum()),
        (jnp.ones((5, 8, 4)), arrays()[1]),
    ),
    "remat": (jax.value_and_grad(remat), arrays()),
    "nested jit": (nested, arrays()),
    "block": (jax.value_and_grad(block), (jnp.ones((32, 16)), jnp.ones((16, 16)))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_op_of_a_program_is_found_once(name, tmp_path):
    f, args = PROGRAMS[name]
    f = jax.jit(f)
    found = bound_args_from_profile(record(tmp_path, f, *args))
    assert len({ba.key for ba in found}) == len(found)
    assert set(found) == set(get_bound_args(f, *args))
    times = [ba.usage.time_ms for ba in found]
    assert times == sorted(times, reverse=True) and times[-1] > 0


def test_runs_are_counted_through_loops_and_call_sites(tmp_path):
    found = bound_args_from_profile(record(tmp_path / "a", jax.jit(several), *arrays()))
    assert {ba.op.flavour: ba.usage.runs for ba in found} == {"a": 2 * RUNS, "b": RUNS}
    (ba,) = bound_args_from_profile(record(tmp_path / "b", jax.jit(scanned), *arrays()))
    assert ba.usage.runs == 4 * RUNS


def test_programs_that_did_not_run_are_left_out_unless_asked_for(tmp_path):
    f, g = jax.jit(Toy(flavour="ran")), jax.jit(Toy(flavour="waits"))
    g(*arrays()).block_until_ready()
    record(tmp_path, f, *arrays())
    assert [op.data["fields"]["flavour"] for op in profiles.read([tmp_path])] == ["ran"]
    every = {op.data["fields"].get("flavour"): op.usage for op in profiles.read([tmp_path], idle=True)}
    assert every["ran"].runs == RUNS and every["waits"] is None


def test_a_trace_without_events_of_programs_still_names_their_ops(tmp_path):
    space = space_with(module((b"dot.1", b"dot", name("dot"), [])))
    assert [op.usage for op in profiles.read([write(tmp_path, space)])] == [None]


@pytest.mark.parametrize("text", ["{", '"', "a/b", "\\", "ü{\n}", "x\"}]}'", "tokamax:{}", "a;b", "a@b", "x" * 5000])
def test_strings_survive_compilation(text, tmp_path):
    class Named(Toy):
        name = "named_for_profiles"

        def _fwd(self, x, w, *, text, return_residuals, config):
            return x @ w, None

    found = bound_args_from_profile(record(tmp_path, jax.jit(lambda x, w: Named()(x, w, text=text)), *arrays()))
    assert [ba.arguments["text"] for ba in found] == [text]


def test_several_files_add_up_and_compressed_ones_are_read(tmp_path):
    record(tmp_path / "profile", jax.jit(Toy()), *arrays())
    (path,) = (tmp_path / "profile").rglob("*.xplane.pb")
    (tmp_path / "again.xplane.pb.gz").write_bytes(gzip.compress(path.read_bytes()))
    (one,) = bound_args_from_profile(path)
    (both,) = bound_args_from_profile(tmp_path)
    assert both.usage == one.usage + one.usage
    assert bound_args_from_profile(path, path)[0].usage == one.usage


def test_unknown_ops_are_kept_as_data_and_passed_over_with_one_warning(tmp_path):
    class Gone(Toy):
        name = "gone_later"

    record(tmp_path, jax.jit(lambda x, w: Gone()(x, w) + Toy()(x + 1, w)), *arrays())
    from tokamax._src import registry

    registry._ops.pop("gone_later")
    assert {op.data["op"] for op in profiles.read([tmp_path])} == {"gone_later", "toy"}
    with pytest.warns(UserWarning, match="1 op calls of the profile are not understood.*'gone_later' is not known"):
        assert [ba.op.registered_name() for ba in bound_args_from_profile(tmp_path)] == ["toy"]


def test_usage_travels_through_json():
    bound = [Toy.bind(*arrays(4)), tokamax.BoundArguments(Toy(), Toy.bind(*arrays(8)).arguments, usage=Usage(3, 1.5))]
    text = tokamax.autotuning.bound_args_to_json(bound)
    back = tokamax.autotuning.bound_args_from_json(text)
    assert back == tuple(bound) and [ba.usage for ba in back] == [None, Usage(3, 1.5)]


@pytest.mark.parametrize("profile", [3, {}, {"runs": "x", "time_ms": 1}, {"runs": -1, "time_ms": 1.0}])
def test_damaged_usage_is_named(profile):
    data = json.loads(tokamax.autotuning.bound_args_to_json([Toy.bind(*arrays())]))
    data["bound_args"][0]["profile"] = profile
    with pytest.raises(errors.FormatError, match="time_ms"):
        tokamax.autotuning.bound_args_from_json(json.dumps(data))


# Profiles of other devices, put together by hand from what XLA writes there.


def key(flavour="plain"):
    return Toy(flavour=flavour).bind(*arrays()).key


def name(path, flavour="plain"):
    return f"jit(f)/{SCOPE_PREFIX}{key(flavour)}/{path}".encode()


def module(*instructions, bodies=()):
    """A compiled module of (name, opcode, op_name, called computations), as bytes."""
    hlo = xspace.messages()["HloModule"](name=b"jit_f", id=7)
    for number, body in enumerate([instructions, *bodies]):
        computation = hlo.computations.add(id=number)
        for instruction, opcode, op_name, called in body:
            added = computation.instructions.add(name=instruction, opcode=opcode, called_computation_ids=called)
            added.metadata.op_name = op_name
    return hlo.SerializeToString()


class Plane:
    """One plane of a profile, with its statistics and events."""

    def __init__(self, space, name):
        self.plane = space.planes.add(name=name)
        self.numbers = {}

    def number(self, text):
        if text not in self.numbers:
            self.numbers[text] = len(self.numbers) + 1
            self.plane.stat_metadata.add(key=self.numbers[text]).value.name = text
        return self.numbers[text]

    def stats(self, into, values, refer=False):
        for stat, value in values.items():
            added = into.add(metadata_id=self.number(stat))
            if isinstance(value, int):
                added.uint64_value = value
            elif refer:
                added.ref_value = self.number(value)
            else:
                added.bytes_value = value

    def metadata(self, name, **stats):
        entry = self.plane.event_metadata.add(key=len(self.plane.event_metadata) + 1)
        entry.value.name = name
        self.stats(entry.value.stats, {k.encode(): v for k, v in stats.items()})
        return entry.key

    def event(self, line, metadata, start_ms, end_ms, **stats):
        while len(self.plane.lines) <= line:
            self.plane.lines.add(timestamp_ns=10)
        ps = 10**9
        event = self.plane.lines[line].events.add(metadata_id=metadata)
        event.offset_ps, event.duration_ps = int(start_ms * ps), int((end_ms - start_ms) * ps)
        self.stats(event.stats, {k.encode(): v for k, v in stats.items()}, refer=True)


def write(tmp_path, space):
    path = tmp_path / "made.xplane.pb"
    path.write_bytes(space.SerializeToString())
    return path


def space_with(hlo, **stats):
    space = xspace.messages()["XSpace"]()
    host = Plane(space, b"/host:metadata")
    wrapped = xspace.messages()["HloProto"](hlo_module=xspace.messages()["HloModule"].FromString(hlo))
    number = host.metadata(b"jit_f(7)")
    host.stats(host.plane.event_metadata[number - 1].value.stats, {b"Hlo Proto": wrapped.SerializeToString(), **stats})
    return space


def test_gpu_events_refer_to_names(tmp_path):
    space = space_with(module((b"fusion.1", b"fusion", name("dot"), [])), **{})
    gpu = Plane(space, b"/device:GPU:0")
    kernel = gpu.metadata(b"triton_kernel")
    gpu.event(0, kernel, 0, 2, hlo_op=b"fusion.1", hlo_module=b"jit_f")
    gpu.event(0, kernel, 3, 4, hlo_op=b"fusion.1", hlo_module=b"jit_f", program_id=7)
    (ba,) = bound_args_from_profile(write(tmp_path, space))
    assert ba.usage == Usage(2, 3.0)


def test_tpu_events_name_the_op_themselves(tmp_path):
    space = xspace.messages()["XSpace"]()
    tpu = Plane(space, b"/device:TPU:0")
    tpu.event(0, tpu.metadata(b"%fusion.1 = f32[8]", tf_op=name("dot"), program_id=2**64 - 5), 0, 2)
    tpu.event(0, tpu.metadata(b"%copy = f32[8]", tf_op=b"jit(f)/copy", program_id=2**64 - 5), 2, 9)
    (ba,) = bound_args_from_profile(write(tmp_path, space))
    assert ba.usage == Usage(1, 2.0)


def test_of_several_devices_the_slowest_counts(tmp_path):
    space = space_with(module((b"dot.1", b"dot", name("dot"), [])))
    for number, ms in enumerate((3, 5, 4)):
        device = Plane(space, f"/device:TPU:{number}".encode())
        device.event(0, device.metadata(b"dot.1"), 0, ms, program_id=7)
    (ba,) = bound_args_from_profile(write(tmp_path, space))
    assert ba.usage == Usage(1, 5.0)


def test_a_loop_and_its_body_count_once(tmp_path):
    instructions = [(b"while.1", b"while", name("while"), [1]), (b"dot.1", b"dot", name("while/body/dot"), [])]
    space = space_with(module(*instructions))
    cpu = Plane(space, b"/host:CPU")
    cpu.event(0, cpu.metadata(b"while.1"), 0, 10, program_id=7)
    for i in range(4):
        cpu.event(1 + i % 2, cpu.metadata(b"dot.1"), 1 + 2 * i, 4 + 2 * i, program_id=7)
    (ba,) = bound_args_from_profile(write(tmp_path, space))
    assert ba.usage == Usage(1, 10.0)


def test_a_fusion_without_a_name_belongs_to_what_was_fused(tmp_path):
    inside = [
        (b"a", b"add", name("add", "often"), []),
        (b"m", b"multiply", name("add", "often"), []),
        (b"e", b"exponential", name("exp", "rare"), []),
        (b"n", b"negate", b"jit(f)/neg", []),
    ]
    space = space_with(module((b"fusion.1", b"fusion", b"", [1]), bodies=[inside]))
    cpu = Plane(space, b"/host:CPU")
    cpu.event(0, cpu.metadata(b"fusion.1"), 0, 2, program_id=7)
    found = bound_args_from_profile(write(tmp_path, space))
    assert {ba.op.flavour: ba.usage for ba in found} == {"often": Usage(1, 2.0), "rare": None}


def test_a_loop_of_the_users_own_belongs_to_no_op(tmp_path):
    body = [(b"dot.1", b"dot", name("dot"), [])]
    space = space_with(module((b"while.1", b"while", b"jit(f)/while", [1]), bodies=[body]))
    cpu = Plane(space, b"/host:CPU")
    cpu.event(0, cpu.metadata(b"while.1"), 0, 10, program_id=7)
    cpu.event(0, cpu.metadata(b"dot.1"), 1, 2, program_id=7)
    (ba,) = bound_args_from_profile(write(tmp_path, space))
    assert ba.usage == Usage(1, 1.0)


# What is no profile.


def hlo_of(f, *args):
    return jax.jit(f).lower(*args).compile().runtime_executable().hlo_modules()[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: b"", "an empty file"),
        (lambda whole: whole[: len(whole) // 2], "cut short or damaged"),
        (lambda whole: gzip.compress(whole)[:-50], "whole gzip file"),
        (lambda whole: hlo_of(Toy(), *arrays()).to_string().encode(), "the text of a program"),
        (lambda whole: jax.jit(Toy()).lower(*arrays()).as_text().encode(), "the text of a program"),
        (lambda whole: hlo_of(Toy(), *arrays()).as_serialized_hlo_module_proto(), "an HLO dump"),
        (lambda whole: b'{"traceEvents": []}', "JSON"),
        (lambda whole: b"\x12\x03abc", "without planes"),
        (lambda whole: b"\xff" * 100, "another kind of file"),
    ],
    ids=["empty", "truncated", "gzip", "hlo", "mlir", "proto", "json", "other", "noise"],
)
def test_what_is_no_profile_is_called_what_it_is(content, words, tmp_path):
    record(tmp_path / "whole", jax.jit(Toy()), *arrays(), runs=1)
    (whole,) = (tmp_path / "whole").rglob("*.xplane.pb")
    path = tmp_path / "file.xplane.pb"
    path.write_bytes(content(whole.read_bytes()))
    with pytest.raises(errors.FormatError, match=words) as error:
        bound_args_from_profile(path)
    assert str(path) in str(error.value)


def test_wrapped_hlo_dumps_are_told_apart_from_profiles(tmp_path):
    hlo = xspace.messages()["HloModule"].FromString(hlo_of(Toy(), *arrays()).as_serialized_hlo_module_proto())
    path = tmp_path / "module_0001.hlo.pb"
    path.write_bytes(xspace.messages()["HloProto"](hlo_module=hlo).SerializeToString())
    with pytest.raises(errors.FormatError, match="an HLO dump"):
        bound_args_from_profile(path)


def test_profiles_without_ops_say_what_is_missing(tmp_path):
    space = xspace.messages()["XSpace"]()
    Plane(space, b"/host:CPU")
    with pytest.raises(errors.FormatError, match="must hold a compiled module"):
        bound_args_from_profile(write(tmp_path, space))
    space = space_with(module((b"dot.1", b"dot", b"jit(f)/dot", [])))
    with pytest.raises(errors.FormatError, match="one of the 1 compiled modules.*must call a tokamax op"):
        bound_args_from_profile(write(tmp_path, space))


def test_folders_must_hold_a_profile(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(errors.FormatError, match="must hold a profile"):
        bound_args_from_profile(tmp_path)
    with pytest.raises(FileNotFoundError):
        bound_args_from_profile(tmp_path / "missing")


def test_without_protobuf_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.xplane.pb").write_bytes(b"x")
    xspace.messages.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(errors.MissingExtraError, match=r"tokamax\[profile\]"):
        bound_args_from_profile(tmp_path)
    xspace.messages.cache_clear()
