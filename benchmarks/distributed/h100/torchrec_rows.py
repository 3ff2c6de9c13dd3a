import sys, numpy as np, pyarrow as pa, pyarrow.parquet as pq
n, out = int(sys.argv[1]), sys.argv[2]
g = np.random.default_rng(0); m = min(n, 500_000)
c = {"label": (g.random(m) < .2).astype(np.int8)}
for i in range(1, 14): c[f"I{i}"] = g.integers(0, 1000, m).astype(np.int32)
for i in range(1, 27): c[f"C{i}"] = pa.array(np.minimum(g.zipf(1.2, m), 10_000).astype(np.int64)).cast(pa.string())
t = pa.table(c); w = pq.ParquetWriter(out, t.schema)
for part in range(max(1, n // 500_000)): w.write_table(t)
w.close()
