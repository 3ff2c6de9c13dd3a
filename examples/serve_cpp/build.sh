#!/bin/sh
# Builds score.cpp against the torch of the Python that runs here (PYTHON names another): sh build.sh OUT
set -eu
torch=$("${PYTHON:-python}" -c 'import torch; print(torch.__path__[0])')
exec "${CXX:-g++}" -O1 -std=c++20 -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
  "$(dirname "$0")/score.cpp" -L"$torch/lib" -Wl,-rpath,"$torch/lib" -ltorch -ltorch_cpu -lc10 -o "$1"
