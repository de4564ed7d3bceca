#!/bin/bash
# The same training on machines that you reach by ssh, without a password:
#
#     NODES="node0 node1" RANKS_PER_NODE=4 ./train_over_ssh.sh [arguments of train.py]
#
# One torchrun a node, all with the same words but --node-rank. The first node has the store, at
# PORT. Each machine needs the project and the environment at the same path, and the folder of
# checkpoints must be one that all machines see. Lesson: surviving_failures.
#
# What torchrun prints after a mistake (torch 2.13; tests/test_torchrun.py makes each of those that
# have no star):
#
#   the port is taken, or two nodes    "The server socket has failed to listen on any local network
#   have node rank 0                   address. port: ..., EADDRINUSE"; choose another PORT. With
#                                      c10d an agent goes on as a client of whatever listens there:
#                                      with a web server it prints nothing, for 45 s and more *
#   a name that nobody knows, no       "The client socket has timed out after ...ms while trying to
#   node has rank 0, or a firewall *   connect to (ADDRESS, PORT)", after 600 s (c10d: 60 s, and then
#                                      "The connection to the C10d store has failed"). Try from the
#                                      other node: nc -vz node0 29400
#   a node is missing, or has          "Timed out after ... seconds waiting for clients. 1/2 clients
#   another number of nodes *          joined". c10d: "RendezvousTimeoutError", and no node's name
#   GLOO_SOCKET_IFNAME is not there    "Unable to find address for: nosuch0"
#   c10d: a node's host has a name     "[c10d] The IPv6 network addresses of (NAME, port) cannot be
#   that the others do not know *      retrieved", again and again. --local-addr=ADDRESS gives them
#                                      another. (Here all are told --master-addr, and ask for no other)
#
# A firewall must let through more than PORT: gloo and NCCL connect ranks to each other at ports that
# the system chooses. In a firewall between nodes, open all ports (on Linux: those in
# /proc/sys/net/ipv4/ip_local_port_range). If only PORT is open, the rendezvous ends well and the
# first collective hangs.
#
# What changes with NCCL (not run here): one GPU a rank, which train.py takes by its local rank.
# The rendezvous and all of the above stay, since the store is TCP. NCCL chooses interfaces itself,
# InfiniBand first:
# NCCL_SOCKET_IFNAME names one (gloo has its own, GLOO_SOCKET_IFNAME), NCCL_DEBUG=INFO prints what was
# chosen, NCCL_IB_DISABLE=1 goes without InfiniBand. A node that dies does not close its connections
# at once, and a rank in an NCCL call does not notice: its watchdog ends it after the group's timeout
# (10 minutes if nobody says; md.launch says 30 s), where gloo reads "Connection reset by peer".

set -euo pipefail

read -r -a nodes <<<"${NODES:?the names of the machines, such as NODES=\"node0 node1\"}"
ranks_per_node=${RANKS_PER_NODE:-gpu} # gpu: as many as the machine has
port=${PORT:-29400}
project=${PROJECT:-$PWD}
script=${SCRIPT:-train.py}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT # Ctrl-C, or one that failed, ends all

for rank in "${!nodes[@]}"; do
    # -tt: the torchrun of a machine ends when its ssh ends.
    command=(
        torchrun
        --nnodes="${#nodes[@]}"
        --node-rank="$rank"
        --nproc-per-node="$ranks_per_node"
        --master-addr="${nodes[0]}"
        --master-port="$port"
        "$script" "$@"
    )
    ssh -tt "${nodes[$rank]}" "cd ${project@Q} && PATH=${PATH@Q} exec ${command[*]@Q}" </dev/null &
    pids+=($!)
done

for _ in "${nodes[@]}"; do
    wait -n # the status of the one that ends next
done
