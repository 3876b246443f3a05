import pytest

import tokamax
from tokamax._src import errors
from tokamax._src.tools import cli, targets
from toy import Toy, arrays


def read(*words):
    return targets.bound_arguments(cli.parser().parse_args(["tune", *words]))


ARRAYS = ("--arg", "f32[8,4]", "--arg", "w=f32[4,6]")


def test_a_file(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(tokamax.autotuning.bound_args_to_json([Toy.bind(*arrays())]))
    assert read(str(path)) == (Toy.bind(*arrays()),)
    with pytest.raises(errors.ArgumentError, match="for a function or an op"):
        read(str(path), *ARRAYS)


def test_a_function_with_shapes():
    assert read("programs:layer", *ARRAYS) == (Toy.bind(*arrays()),)
    found = read("programs:layer", *ARRAYS, "--arg", "twice=true")
    assert [ba.op.flavour for ba in found] == ["plain", "second"]


def test_a_function_with_arguments_from_another():
    assert read("programs:layer", "--args-from", "programs:inputs") == (Toy.bind(*arrays()),)
    assert read("programs:layer", "--args-from", "programs:named_inputs") == (Toy.bind(*arrays(4)),)
    found = read("programs:layer", "--args-from", "programs:named_inputs", "--arg", "x=f32[8,4]")
    assert found == (Toy.bind(*arrays()),)
    with pytest.raises(errors.ArgumentError, match="must return a tuple or a dict"):
        read("programs:layer", "--args-from", "programs:no_inputs")


def test_an_op_with_shapes():
    assert read("toy", *ARRAYS, "--arg", "scale=2.0") == (Toy.bind(*arrays(), scale=2.0),)
    assert read("programs.Own", "--import", "programs", *ARRAYS)[0].op.registered_name() == "programs.Own"


def test_the_command_that_measures_a_target_names_it_again():
    words = ["programs:layer", *ARRAYS, "--args-from", "programs:inputs", "--import", "programs"]
    args = cli.parser().parse_args(["explain", *words])
    assert targets.tune_command(args) == (
        "tokamax tune programs:layer --arg 'f32[8,4]' --arg 'w=f32[4,6]' --args-from programs:inputs "
        "--import programs --save"
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["nothing"], "must be a file that exists, MODULE:FUNCTION, or the name of an op.*toy"),
        (["no_such_module:f"], "must be importable.*no_such_module"),
        (["programs:nothing"], "must name a function"),
        (["programs:layer", "--arg", "f32[8,4]"], "the arguments must fit"),
        (["programs:layer", "--arg", "f32[8,4]{3}", "--arg", "f32[4,6]"], "no vmap axes"),
        (["toy", "--arg", "f32[8,4]"], "toy"),
        (["toy", "--import", "no_such_module"], "must be importable"),
    ],
)
def test_what_cannot_be_found_is_named(words, match):
    with pytest.raises(errors.ArgumentError, match=match):
        read(*words)
    assert cli.main(["explain", *words]) == 2


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "only_here_for_a_test.py").write_text("from programs import layer\n")
    monkeypatch.chdir(tmp_path)
    assert read("only_here_for_a_test:layer", *ARRAYS) == (Toy.bind(*arrays()),)


def test_a_missing_file_is_not_taken_for_an_op(tmp_path, capsys):
    assert cli.main(["tune", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
