import numpy as np
import pytest
from typer.testing import CliRunner
from with_pyarrow import pa, parquet

from loka.cli.commands.data import data_app
from loka.core.exceptions import DataRefused, LokaError
from loka.data import CRITEO, build_vocabulary, open_shards, read_vocabulary


@pytest.fixture
def rows(tmp_path):
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 2 if name == "label" else 9, 200) for name in CRITEO.columns}
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


def run(*command):
    done = CliRunner().invoke(data_app, [f"{part}" for part in command], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_convert_info_check_and_speed(rows, tmp_path):
    folder = tmp_path / "out"
    output = run("convert", rows, "--out", folder, "--min-count", 3, "--max-size", 5, "--holdout", 0.5)
    assert f"200 rows in {folder}" in output
    assert "unknown categories" in output
    assert read_vocabulary(folder / "vocabulary.json") == build_vocabulary(rows, rows=100, min_count=3, max_size=5)
    shown = run("info", folder)
    assert "200 rows in 1 of 1 shards" in shown
    assert f"C26: {open_shards(folder).vocab_sizes[-1]} ids" in shown
    assert "200 rows read, all as written" in run("check", folder)
    assert "rows/s over 200 rows" in run("speed", folder, "--batch-size", 32)


def test_a_test_set_takes_the_ids_of_the_training_set(rows, tmp_path):
    run("convert", rows, "--out", tmp_path / "train", "--min-count", 4)
    run("convert", rows, "--out", tmp_path / "test", "--vocabulary", tmp_path / "train")
    first, second = (read_vocabulary(tmp_path / name / "vocabulary.json") for name in ("train", "test"))
    assert first == second


def test_shards_do_not_go_to_a_file(rows):
    with pytest.raises(DataRefused, match=r"rows\.parquet is a file, and shards go to a folder"):
        run("convert", rows, "--out", rows, "--buckets", 9)


def test_damage_is_found_by_check(rows, tmp_path):
    run("convert", rows, "--out", tmp_path / "out", "--buckets", 10)
    shard = tmp_path / "out" / "shard-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataRefused, match=r"shard-00000\.parquet"):
        run("check", tmp_path / "out")


@pytest.mark.parametrize("options", [(), ("--buckets", 5, "--min-count", 2), ("--buckets", 5, "--holdout", 0.1)])
def test_unclear_vocabularies_are_refused(rows, tmp_path, options):
    with pytest.raises(LokaError, match="--min-count"):
        run("convert", rows, "--out", tmp_path / "out", *options)


def test_days_in_the_order_of_the_alphabet_are_refused(rows, tmp_path):
    """As a shell writes day_* out; held out would be rows of day 2."""
    days = [rows.rename(tmp_path / "day_1.parquet")]
    days += [tmp_path / f"day_{day}.parquet" for day in (10, 2)]
    for day in days[1:]:
        day.write_bytes(days[0].read_bytes())
    with pytest.raises(LokaError, match=r"day_10\.parquet stands where .*day_2\.parquet should(.|\n)*ls -v"):
        run("convert", *days, "--out", tmp_path / "out", "--buckets", 9)
    assert not (tmp_path / "out").exists()
    assert "600 rows" in run("convert", days[0], days[2], days[1], "--out", tmp_path / "out", "--buckets", 9)
