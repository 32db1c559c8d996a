#!/bin/bash
# Convert, train, export: three jobs, each of which starts when the one before has ended well.
#
#   MODEL=data/GLM-4.5 SAVE=data/GLM-4.5_torch_dist RUN=runs/glm-4.5 NODES=2 \
#       bash sbatch/chain.sh examples/glm-4.5-355b-64gpu-bf16.toml --site SITE --set exclusive=true trainer.mem=0
#
# What follows the recipe goes to hpcrl submit. NODES: of the conversion. Partition and account of the two jobs around the
# training come from SBATCH_PARTITION and SBATCH_ACCOUNT, which sbatch reads itself.
set -euo pipefail

: "${MODEL:?the Hugging Face directory}" "${SAVE:?where the converted checkpoint is to lie}" "${RUN:?the run directory}"
here=$(dirname "$0")
recipe=${1:?the recipe}
shift

convert=$(MODEL=$MODEL SAVE=$SAVE sbatch --parsable --export=ALL --nodes="${NODES:-1}" "$here/convert.sbatch")
convert=${convert%%;*}
echo "convert: job $convert"

submitted=$(hpcrl submit "$recipe" "$@" --run-dir "$RUN" --ref-load "$SAVE" --after "$convert")
train=$(sed -n 's/^job //p' <<< "$submitted")
echo "train:   job $train"

export_job=$(RUN=$RUN sbatch --parsable --export=ALL --dependency="afterok:$train" --kill-on-invalid-dep=yes "$here/export.sbatch")
echo "export:  job ${export_job%%;*}"
