"""Variants of an edge's text: E1 maxima in threads as numbers, E2 several groups a program, E3 factors of rows pulled out."""
import sys, json
from loka.kernels.edge.program import program_of
def pulled(line):
    d=json.loads(line); b=d["block"]; bs="block_sum" if b!=d["features"] else "row_sum"
    op=[s for s in d["steps"] if s[0] in("row_sum","block_sum")][0][0]
    d["steps"]=[["sub",1,"127.5"],["mul",0,5],["mul",6,7],["div",8,"3.0"],["add",9,"0.5"],["mul",4,10],["lt",8,"3.0"],["where",12,11,4],["le",8,"-3.0"],["where",14,"0.0",13],["mul",15,6],[op,16],["mul",17,0],["mul",18,0],["mul",19,2],["mul",20,3],["mul",21,repr(-1/256)],["mul",6,22],["mul",5,3],["mul",15,24],["add",25,23],["add",8,"3.0"],["maximum",27,"0.0"],["minimum",28,"6.0"],["mul",8,29],["div",30,"6.0"]]
    d["gradient"]=26; d["transposed"]=31
    return json.dumps(d,separators=(",",":"))
DEV='''
import triton, triton.language as tl
from loka.kernels.edge.triton.device import maximum_of
@triton.jit
def largest_of(value, V: tl.constexpr):
    apart = tl.reshape(tl.abs(value), [value.shape[0], value.shape[1] // V, V])
    return tl.reduce(apart, 2, maximum_of).to(tl.int32, bitcast=True)
'''
def vary(text, e1, e2, vector=8):
    out=[]
    lines=text.split("\n")
    head=next(i for i,l in enumerate(lines) if l.startswith("def "))
    out=lines[:head+1]; body=lines[head+1:]
    if e1: body=[l.replace("tl.max(tl.abs(v24_0).to(tl.int32, bitcast=True), axis=1)",f"tl.max(largest_of(v24_0, {vector}), axis=1)").replace("tl.max(tl.abs(v26_0).to(tl.int32, bitcast=True), axis=1)",f"tl.max(largest_of(v26_0, {vector}), axis=1)") for l in body]
    if e2>1:
        pre=[l for l in body if ("top = top_of" in l or "by = inverse_of_power" in l)]
        rest=[l for l in body if l not in pre]
        rest=[l.replace("tl.program_id(0).to(tl.int64)","group.to(tl.int64)").replace("tops_ptr + tl.program_id(0)","tops_ptr + group").replace("if tl.program_id(0) == 0","if group == 0") for l in rest]
        body=pre+[f"    for group in range(tl.program_id(0) * {e2}, tl.minimum(tl.program_id(0) * {e2} + {e2}, tl.cdiv(rows, 32))):"]+["    "+l for l in rest]
    return "\n".join(out+body)
