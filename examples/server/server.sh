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

echo "== doctor: what would fail in an hour fails now"
stagekit doctor . "$BUCKET"

echo "== pull: model and data, every byte compared; what is here already is not fetched again"
stagekit pull "$BUCKET/models/$MODEL" base
stagekit pull "$BUCKET/$DATA" data

echo "== train: the newest checkpoint is fetched first, and what is saved goes to the bucket"
# In the background and waited for: bash hands a signal on only while it waits.
stagekit run --to "$RUN" --watch out --max-hours "$HOURS" --stall 30m -- bash -c "$TRAIN" &
training=$!
asked=no # to end: a training that saves and ends with 0 then is not done
trap 'asked=yes; kill -TERM "$training" 2>/dev/null || true' TERM INT HUP
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ends the wait, not the training
    code=0
    wait "$training" || code=$?
done

echo "== teardown: sends what is left; only YES is exit code 0"
stagekit teardown
if [ "$asked" = yes ]; then
    echo "this server was asked to end, so nothing is destroyed; nothing would be lost with it, and the next one goes on" >&2
    exit "$code"
fi
if [ "$code" != 0 ] && [ "$code" != 6 ]; then # 6: the hours are over
    echo "the training ended with $code, so this server stays for a look; nothing would be lost with it" >&2
    exit "$code"
fi
echo "== this server may be destroyed"
if [ -n "$DESTROY" ]; then
    bash -c "$DESTROY"
fi
