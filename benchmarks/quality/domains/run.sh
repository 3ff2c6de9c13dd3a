# 120,000 rows to train on, 60,000 to judge by; eight minutes on 2 cores.
set -e
python rows.py
loka data convert tr.csv --out tr --schema schema.json --min-count 2
loka data convert te.csv --out te --schema schema.json --vocabulary tr
loka probe --model mmoe:small:0 --data tr --out st --segment sparse:0:6 --every 20 --no-mods
loka measure st --errors-only --out report.json --candidate emulated:rowwise_e4m3_pow2
loka plan report.json --ne 1e-4 --out mean.json
loka plan report.json --ne 1e-4 --ne-of "sparse:0 = 3=5e-5" --out part.json
loka validate --arm mean.json --arm part.json --model mmoe:small:0 --data tr --test-data te --pairs 12 --segment sparse:0:6 --segment-limit 0.5 --no-mods --out val12
