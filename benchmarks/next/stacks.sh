# Why was the compiled arm of the gated FFN not ready within 143 s on 2026-11-30? Stacks of all threads, every 20 s.
export PYTHONFAULTHANDLER=1
python -c "
import faulthandler, runpy, sys
faulthandler.dump_traceback_later(20, repeat=True)
sys.argv = ['benchmarks/regions/regions.py', *'--cells swiglu_8192x1024-2816 --arms bf16_whole,loka --rounds 9 --plans plans --out swiglu.jsonl'.split()]
sys.path.insert(0, 'benchmarks/regions')
runpy.run_path(sys.argv[0], run_name='__main__')
"
