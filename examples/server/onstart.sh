#!/usr/bin/env bash
# server.sh in a container without systemd, such as a pod of RunPod or an instance of vast.ai: make this the container's start command
# ("docker command", "on-start script"), with the variables of server.sh and the AWS_… ones set for the container.
#
# It stays in front until server.sh has ended. When it gets SIGTERM, server.sh does, and sends what there is to send. It is safe to be started
# again, as these hosts do with each restart of the container: the training goes on, and a finished one is found finished.
# The test suite runs it, on no such host.
set -euo pipefail

HERE=$(dirname "$(readlink -f "$0")")
WORK=${WORK:-/workspace/train} # on RunPod a volume that stays; elsewhere any local disk
STAGEKIT=${STAGEKIT:-git+https://…/stagekit}

mkdir -p "$WORK"
cd "$WORK"
if ! command -v stagekit >/dev/null; then
    python3 -m pip install --quiet "stagekit-ml[torch,transformers] @ $STAGEKIT" peft
fi
exec bash "$HERE/server.sh"
