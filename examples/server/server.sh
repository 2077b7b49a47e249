#!/usr/bin/env bash
# The whole life of a rented server: look, fetch, train, and be destroyed once nothing would be lost with it.
# The next server gets the same line and goes on where this one was:
#
#     BUCKET=s3://my-bucket server.sh
#
# Endpoint and keys are in the usual AWS_… variables. What is watched and what is recorded lies in the directory in which this is started.
# When it is asked to end (SIGTERM: a shutdown, docker stop), the newest checkpoint is sent, and nothing is destroyed.
set -euo pipefail

BUCKET=${BUCKET:-s3://my-bucket}
MODEL=${MODEL:-llama}                # $BUCKET/models/$MODEL becomes ./base
DATA=${DATA:-chat}                   # $BUCKET/$DATA becomes ./data
RUN=${RUN:-$BUCKET/runs/$MODEL-$DATA}
HOURS=${HOURS:-24}                   # the training ends after so many
DESTROY=${DESTROY:-}                 # the provider's command that destroys this server; without it, that is left to you
TRAIN=${TRAIN:-python /opt/train/lora_plain.py} # saves into ./out, and goes on from what it finds there

asked=no # to end: a training that saves and ends with 0 then is not done
child=
trap 'asked=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM INT HUP

# Runs a command to its end; its exit code is in $code. In the background and waited for: bash hears a signal only while it waits, and as a
# container's first process it would not hear one at all without the trap.
step() {
    local heard=$asked
    "$@" &
    child=$!
    [ "$asked" = "$heard" ] || kill -TERM "$child" 2>/dev/null || true # it came just before there was somebody to tell
    code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends the wait, not the command
        code=0
        wait "$child" || code=$?
    done
    child=
}

# A step before the training: all is over when it fails, or when the server is asked to end meanwhile.
before() {
    step "$@"
    [ "$asked" = no ] || exit 143
    [ "$code" = 0 ] || exit "$code"
}

echo "== doctor: what would fail in an hour fails now"
before stagekit doctor . "$BUCKET"

echo "== pull: model and data, every byte compared; what is here already is not fetched again"
before stagekit pull "$BUCKET/models/$MODEL" base
before stagekit pull "$BUCKET/$DATA" data

echo "== train: the newest checkpoint is fetched first, and what is saved goes to the bucket"
step stagekit run --to "$RUN" --watch out --max-hours "$HOURS" --stall 30m -- bash -c "$TRAIN"
trained=$code

echo "== teardown: sends what is left; only YES is exit code 0"
step stagekit teardown
[ "$code" = 0 ] || exit "$code"
if [ "$asked" = yes ]; then
    echo "this server was asked to end, so nothing is destroyed; nothing would be lost with it, and the next one goes on" >&2
    exit "$trained"
fi
if [ "$trained" != 0 ] && [ "$trained" != 6 ]; then # 6: the hours are over
    echo "the training ended with $trained, so this server stays for a look; nothing would be lost with it" >&2
    exit "$trained"
fi
echo "== this server may be destroyed"
if [ -n "$DESTROY" ]; then
    bash -c "$DESTROY"
fi
