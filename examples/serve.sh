#!/usr/bin/env bash
# Hand a model over to an inference server: from the bucket to this machine's NVMe, in the layout that the server loads.
#
#     serve.sh safetensors    a snapshot directory, for vLLM, TGI and from_pretrained
#     serve.sh gguf           a .gguf file with a Modelfile, for llama.cpp and Ollama
#
# Every byte is compared before a file gets its name, so a server never loads half a model. Given again, it copies nothing.
set -euo pipefail

BUCKET=${BUCKET:-s3://my-bucket}
MODEL=${MODEL:-llama}          # s3://my-bucket/models/llama, or s3://my-bucket/gguf/llama with one .gguf file
NAME=${NAME:-}                 # a name of the Hub, such as meta-llama/Llama-3.2-1B: from_pretrained(NAME) then finds the copy offline
NVME=${NVME:-/mnt/nvme/models} # a local disk, not a network volume

mkdir -p "$NVME"
case ${1:-} in
safetensors)
    stagekit pull "$BUCKET/models/$MODEL" "$NVME/$MODEL" ${NAME:+--link-hf "$NAME"}
    if [ -n "${ADAPTER:-}" ]; then # a run that lora.py or lora_plain.py wrote, such as s3://my-bucket/runs/llama-chat
        stagekit pull "$ADAPTER" "$NVME/$MODEL-adapter"
    fi
    cat <<MESSAGE
load it with one of
  vllm serve $NVME/$MODEL${ADAPTER:+ --enable-lora --lora-modules chat=$NVME/$MODEL-adapter}
  text-generation-launcher --model-id $NVME/$MODEL
MESSAGE
    ;;
gguf)
    stagekit pull "$BUCKET/gguf/$MODEL" "$NVME/$MODEL-gguf"
    files=("$NVME/$MODEL-gguf"/*.gguf)
    printf 'FROM ./%s\n' "${files[0]##*/}" >"$NVME/$MODEL-gguf/Modelfile"
    cat <<MESSAGE
load it with one of
  llama-server --model ${files[0]}
  ollama create $MODEL --file $NVME/$MODEL-gguf/Modelfile
MESSAGE
    ;;
*)
    echo "serve.sh safetensors, or serve.sh gguf; BUCKET, MODEL, NAME, ADAPTER and NVME say which and where" >&2
    exit 2
    ;;
esac
