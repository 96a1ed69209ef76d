#!/bin/bash
# Trains a small language model on two nodes. The corpus is copied to the fast file system before any node starts, and the results
# go back to the bucket after the nodes are free. Put your bucket's name in the place of BUCKET, then: sbatch train.sh
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --time=10
#SLUICE stage_in source=gs://BUCKET/corpus/ name=corpus
#SLUICE stage_out from=out/ to=gs://BUCKET/runs/%j/

set -euo pipefail

srun trainer --data "$SLUICE_DATA_CORPUS" --out "$SLUICE_JOB_DIR/out" --steps 200
