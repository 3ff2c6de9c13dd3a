import errno
import hashlib
import importlib.util
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from served import ROW, frozen, rows, tower
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.core.exceptions import NotWritten, ServeRefused
from loka.serve.packaging.triton_folder import TYPES, Batching, add_version, config_of
from loka.serve.rows import Column, Form, names


def served():
    model = tower()
    return frozen(model, {"first": ROW, "second": ROW})


def read(text):
    """As the server does; its description comes with its client, without the client's own imports."""
    pytest.importorskip("google.protobuf")
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tritonclient is not installed")
    from google.protobuf import text_format

    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return text_format.Parse(text, module.ModelConfig())


def test_the_config_says_what_the_model_takes_and_gives():
    server = served()
    form = server.card.form
    output = server(rows(5)).output
    config = read(config_of("ranker-1.0", form, [output], Batching(most=512, delay_us=200)))
    assert (config.name, config.platform, config.max_batch_size) == ("ranker-1.0", "torch_aoti", 512)
    assert config.dynamic_batching.max_queue_delay_microseconds == 200
    assert [one.name for one in config.input] == [f"INPUT__{place}" for place in range(len(form.columns))]
    types = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    for one, column in zip(config.input, form.columns, strict=True):
        assert tuple(one.dims) == (column.sides or (1,))
        assert one.HasField("reshape") == (not column.sides)
        assert types[one.data_type].name == TYPES[column.dtype]
    (given,) = config.output
    assert given.name == "OUTPUT__0"
    assert tuple(given.dims) == (tuple(output.shape[1:]) or (1,))
    assert given.HasField("reshape") == (output.dim() == 1)


def test_the_folder_is_of_the_kind_of_device_that_answers():
    form = Form(kind="named", columns=(Column(name="x", dtype="float32", sides=(3,)),))
    with FakeTensorMode():
        outputs = {kind: torch.zeros(2, device=kind) for kind in ("cpu", "cuda")}
    for kind, told in (("cpu", "KIND_CPU"), ("cuda", "KIND_GPU")):
        assert f"kind: {told} " in config_of("one", form, [outputs[kind]], Batching(most=8))


def test_every_dtype_is_one_of_the_servers():
    columns = tuple(Column(name=dtype, dtype=dtype, sides=(3, 2)) for dtype in TYPES)
    config = read(config_of("all", Form(kind="named", columns=columns), [torch.zeros(2)], Batching(most=1)))
    assert len({one.data_type for one in config.input}) == len(TYPES)
    assert all(tuple(one.dims) == (3, 2) for one in config.input)


def two_inputs(*names):
    return Form(kind="named", columns=tuple(Column(name=name, dtype="float32", sides=(3,)) for name in names))


def test_the_config_says_which_column_and_which_output_each_is():
    y = torch.zeros(2)
    odd = 'a "quoted" one \\ of é, and\na line'
    config = read(config_of("one", two_inputs("user", odd), {"clicks": y, "more": [y, (y,)]}, Batching(most=1)))
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "INPUT__0": "user",
        "INPUT__1": odd,
        "OUTPUT__0": "clicks",
        "OUTPUT__1": "more.0",
        "OUTPUT__2": "more.1.0",
    }
    Pair = namedtuple("Pair", "buys clicks")
    assert names(Pair(y, y)) == ["buys", "clicks"]
    assert names(y) == ["0"]


@pytest.mark.parametrize(
    ("columns", "outputs"), [(("item", "user"), ("clicks", "buys")), (("user", "item"), ("buys", "clicks"))]
)
def test_a_version_with_inputs_or_outputs_in_another_order_is_refused(columns, outputs, tmp_path):
    """Their dtypes and shapes are the same, and clients call by place."""
    package = tmp_path / "made.pt2"
    package.write_bytes(b"whole")
    batching = Batching(most=8)
    first = config_of("ranker", two_inputs("user", "item"), dict.fromkeys(("clicks", "buys"), torch.zeros(2)), batching)
    assert add_version(package, tmp_path, "ranker", first).name == "1"
    other = config_of("ranker", two_inputs(*columns), dict.fromkeys(outputs, torch.zeros(2)), batching)
    with pytest.raises(ServeRefused, match="another order of inputs or outputs"):
        add_version(package, tmp_path, "ranker", other)
    assert add_version(package, tmp_path, "ranker", first).name == "2"


def test_a_folder_of_before_columns_were_named_asks_for_them(tmp_path):
    """It may be in any order: who knows its clients adds the lines."""
    package = tmp_path / "made.pt2"
    package.write_bytes(b"whole")
    config = config_of("ranker", two_inputs("user", "item"), torch.zeros(2), Batching(most=8))
    before = "".join(line for line in config.splitlines(keepends=True) if not line.startswith("parameters"))
    assert add_version(package, tmp_path, "ranker", before).name == "1"
    with pytest.raises(ServeRefused, match="before LoKA noted them") as refused:
        add_version(package, tmp_path, "ranker", config)
    assert "add these lines" in str(refused.value)
    with (tmp_path / "ranker" / "config.pbtxt").open("a") as file:
        file.writelines(line.strip() + "\n" for line in str(refused.value).splitlines() if "string_value" in line)
    assert add_version(package, tmp_path, "ranker", config).name == "2"


def test_what_the_server_cannot_take_is_refused():
    form = Form(kind="named", columns=(Column(name="x", dtype="complex64", sides=()),))
    for name in ("../up", "", "a b", ".hidden"):
        with pytest.raises(ServeRefused, match="cannot take") as refused:
            config_of(name, form, [torch.tensor(1.0)], Batching(most=8))
        told = str(refused.value)
        assert "the input x is complex64" in told
        assert "one number for all rows" in told
        assert f"the name {name!r}" in told
        assert "beginning with a letter, a digit or _" in told
    known = two_inputs("x")
    assert 'name: "_ranker"' in config_of("_ranker", known, torch.zeros(2), Batching(most=8))


def test_versions_are_counted_and_never_half_there(tmp_path):
    package = tmp_path / "made.pt2"
    for number in (1, 2, 3):
        package.write_bytes(b"package %d" % number)
        folder = add_version(package, tmp_path / "models", "ranker", "the config\n")
        assert folder == tmp_path / "models" / "ranker" / str(number)
        assert (folder / "model.pt2").read_bytes() == package.read_bytes()
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        assert (folder / "model.pt2.sha256").read_text() == f"{digest}  model.pt2\n"
    (tmp_path / "models" / "ranker" / "10").mkdir()
    assert add_version(package, tmp_path / "models", "ranker", "the config\n").name == "11"
    with pytest.raises(ServeRefused, match="another form") as refused:
        add_version(package, tmp_path / "models", "ranker", "another config\n")
    assert "the config" in str(refused.value)
    names = sorted(path.name for path in (tmp_path / "models" / "ranker").iterdir())
    assert names == ["1", "10", "11", "2", "3", "config.pbtxt"]


def test_a_copy_that_fails_leaves_no_version(tmp_path, monkeypatch):
    package = tmp_path / "made.pt2"
    package.write_bytes(b"whole")

    def full(source, target):
        target.write_bytes(b"who")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(NotWritten, match=r"(?s)ranker/1.*No space left.*Way out"):
            add_version(package, tmp_path, "ranker", "the config\n")
    assert sorted(path.name for path in (tmp_path / "ranker").iterdir()) == ["config.pbtxt"]
    assert add_version(package, tmp_path, "ranker", "the config\n").name == "1"
    assert sorted(path.name for path in (tmp_path / "ranker").iterdir()) == ["1", "config.pbtxt"]


def test_a_repository_that_is_a_file_is_refused(tmp_path):
    package = tmp_path / "made.pt2"
    package.write_bytes(b"whole")
    with pytest.raises(NotWritten, match="Way out"):
        add_version(package, package, "ranker", "the config\n")


def test_of_several_at_once_each_gets_a_number_or_is_refused(tmp_path):
    from loka.core.storage.alone import InUse

    package = tmp_path / "made.pt2"
    package.write_bytes(b"x" * 1000)
    found = []

    def publish():
        try:
            found.append(add_version(package, tmp_path, "ranker", "the config\n").name)
        except InUse:
            found.append("refused")

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(int(name) for name in found if name != "refused")
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(found) == 8


@pytest.mark.slow
def test_a_server_publishes_its_versions(tmp_path):
    """The files run as packages do (test_serve_package.py); an update of the weights is the next version."""
    server = served()
    first, found = server.publish(tmp_path, "ranker", most=64)
    assert found.batch == (1, 64)
    server.refresh(tower(1).state_dict())
    second, _ = server.publish(tmp_path, "ranker", most=64)
    assert (first.name, second.name) == ("1", "2")
    answers = [torch._inductor.aoti_load_package(str(one / "model.pt2"))(*rows(7)) for one in (first, second)]
    assert not torch.equal(answers[0], answers[1])
    torch.testing.assert_close(answers[1], server(rows(7)).output, rtol=0, atol=server.card.answers[0].mean_abs)
    with pytest.raises(ServeRefused, match="another form"):
        server.publish(tmp_path, "ranker", most=32)
