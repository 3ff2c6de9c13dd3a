from loka.data import Schema

PLAIN = Schema(label="y", dense=("d",), sparse=("c",))
WITH_HISTORY = Schema(label="y", dense=("d",), sparse=("c",), sequence="s", sequence_length=7)


def test_a_schema_is_read_back_from_what_it_writes():
    for schema in (PLAIN, WITH_HISTORY):
        written = schema.to_dict()
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}
        assert Schema(**fields) == schema


def test_a_sequence_that_is_not_used_is_not_written():
    """Manifests of before there were sequences keep their digests."""
    assert set(PLAIN.to_dict()) == {"label", "dense", "sparse", "separator", "header"}
    assert set(WITH_HISTORY.to_dict()) - set(PLAIN.to_dict()) == {"sequence", "sequence_length"}
