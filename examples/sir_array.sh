#!/bin/sh
# The epidemic of sir.py, simulated by an array of jobs of Slurm, a part each. No process has to stay alive for them.
#
#     sbatch --array=1-20 examples/sir_array.sh
#     cpejax fit examples/sir.py --out sir-array    # takes the parts that are there, and says which are missing
#
# Jobs that failed are submitted again, as in PARTS=20 sbatch --array=3,17 examples/sir_array.sh.
#SBATCH --job-name=sir
#SBATCH --time=01:00:00
#SBATCH --cpus-per-task=1
#SBATCH --output=slurm-%A_%a.out

exec "${CPEJAX:-cpejax}" simulate "${MODEL:-examples/sir.py}" --out "${RUN:-sir-array}" \
    --simulations "${SIMULATIONS:-10000}" --part "$SLURM_ARRAY_TASK_ID/${PARTS:-$SLURM_ARRAY_TASK_MAX}"
