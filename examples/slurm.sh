#!/bin/bash
# Trains on all nodes of a SLURM allocation: Ray on each of them, `foveal train` on the first.
#
#     sbatch --nodes=2 --gpus-per-node=8 examples/slurm.sh config=run.yaml trainer.experiment_name=two_nodes
#
# Activate the environment before; `ray` and `foveal` must be found on every node. The run's folder, the model and the
# data must lie on a file system that all nodes share. SIGTERM (300 s before the time limit; `scancel --batch
# --signal=TERM JOB`) saves and ends the run, and the same command goes on from there.
#SBATCH --job-name=foveal
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
set -euo pipefail

nodes=$SLURM_JOB_NUM_NODES
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# Where a node knows its own name as a loopback address the others can't use that one.
ip=$(getent ahostsv4 "$head" | awk '$1 !~ /^127\./ { print $1; exit }')
ip=${ip:-$(hostname -I | cut -d " " -f 1)} # this script runs on the first node
export ADDRESS=$ip:$port
export RAY_worker_niceness=0 # 15 by default: what drives a GPU would wait for whatever else runs
export RAY_health_check_timeout_ms=3000 # a node that vanishes is noticed after half a minute instead of one
# Without a token everybody on the network could run code in this cluster.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}

# shellcheck disable=SC2016 # each node fills in its own values
on_every_node='
    trap "kill -TERM \$!" TERM # the end of the step; the folder is still to be removed
    temporary=/tmp/ray_$SLURM_JOB_ID # not /tmp/ray, which may be another user'"'"'s
    options=(--num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}" --disable-usage-stats --block)
    if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        options+=(--num-gpus="$SLURM_GPUS_ON_NODE")
    fi
    if [[ $SLURM_PROCID == 0 ]]; then
        ray start --head --node-ip-address="${ADDRESS%:*}" --port="${ADDRESS#*:}" --temp-dir="$temporary" \
            --include-dashboard=false "${options[@]}" &
    else
        until (: <"/dev/tcp/${ADDRESS%:*}/${ADDRESS#*:}") 2>/dev/null; do sleep 1; done
        ray start --address="$ADDRESS" "${options[@]}" &
    fi
    while kill -0 $! 2>/dev/null; do wait $! || true; done
    rm -rf "$temporary"
'
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c "$on_every_node" &
ray=$!
trap 'kill -TERM "$ray" 2>/dev/null || true; wait "$ray" || true' EXIT

export RAY_ADDRESS=$ADDRESS
timeout 300 python3 - "$nodes" <<'PYTHON'
import os, socket, sys, time, ray

host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
while socket.socket().connect_ex((host, int(port))):
    time.sleep(1)
ray.init(log_to_driver=False)
while len(alive := [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]) < int(sys.argv[1]):
    time.sleep(1)
print("Ray runs on", *alive, flush=True)
PYTHON

foveal train trainer.nnodes="$nodes" "$@" &
train=$!
trap 'kill -TERM "$train"' TERM INT
status=0
wait "$train" || status=$?
while kill -0 "$train" 2>/dev/null; do # a signal has ended the first wait
    status=0
    wait "$train" || status=$?
done
exit "$status"
