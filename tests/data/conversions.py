from click_files import made_up
from with_pyarrow import pa, parquet

from loka.data import hashed_vocabulary

ALL = 300


ROWS = made_up(ALL, seed=3)


HASHED = hashed_vocabulary(99)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def criteo_parquet(path):
    from loka.data import CRITEO

    columns = dict(zip(CRITEO.columns, map(list, zip(*ROWS, strict=True)), strict=True))
    parquet.write_table(pa.table(columns), path, row_group_size=20)
    return path
