. .spike/env.sh
export TORCHINDUCTOR_CACHE_DIR=/tmp/ind TRITON_CACHE_DIR=/tmp/tri
N=$PYTHONPATH
for i in 1 2 3; do
for t in old new; do
[ $t = old ] && export PYTHONPATH=$PWD/.spike/old/src:$N || export PYTHONPATH=$N
timeout 100 python3 .spike/hostab.py 2>&1 | tail -1
done; done | tee $OUT/hostab.log
export PYTHONPATH=$N
OMP_NUM_THREADS=1 timeout 150 python3 -m pytest -p no:xdist -m gpu -rf --tb=short -p no:cacheprovider tests/planner/choice/test_confirm.py tests/kernels/test_triton_notes.py > $OUT/confirm.log 2>&1; tail -3 $OUT/confirm.log
