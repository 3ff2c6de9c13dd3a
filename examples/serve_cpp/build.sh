#!/bin/sh
# Builds score.cpp against the torch of the Python that runs here (PYTHON names another): sh build.sh OUT
set -eu
torch=$("${PYTHON:-python}" -c 'import torch; print(torch.__path__[0])')
cuda=""  # registers the runner of packages for a GPU, which nothing here calls by name
if [ -e "$torch/lib/libtorch_cuda.so" ]; then cuda="-Wl,--no-as-needed -ltorch_cuda -lc10_cuda"; fi
exec "${CXX:-g++}" -O1 -std=c++20 -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
  "$(dirname "$0")/score.cpp" -L"$torch/lib" -Wl,-rpath,"$torch/lib" $cuda -ltorch -ltorch_cpu -lc10 -o "$1"
