#!/bin/sh
LOKA_PTXAS=$LOKA_PTXAS_BLACKWELL exec "$(dirname "$0")/ptxas.sh" "$@"
